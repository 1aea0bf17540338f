// The signatures of the kernels. This header is included by code compiled for instruction sets that the processor may
// not have, so it must stay free of inline functions: the linker keeps one copy of those, and could keep the wrong one.
#pragma once
#include <cstdint>

#include "tensor/bf16.h"

namespace regather {

// n, rows, cols: elements. Matrices are row-major and dense unless a stride is named. T: float or Bf16, the elements of
// activations, of their gradients and of parameters; arithmetic is fp32, and what is stored is rounded once.

struct AdamWFactors {  // what is left of a step once everything scalar is computed, in double
  float gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, step_size, inverse_root_correction2, eps;
};

// Which Philox words a row of elements draws: element e of the sequence draws word e % 4 of counter e / 4.
struct RandomRow {
  std::uint32_t key[2];
  std::uint64_t sequence;
  std::uint64_t first;  // element of the sequence that the row begins with
};

// One sequence and one key/value head, with the query heads that share it. Strides are those of a token, in elements.
struct AttentionShape {
  std::int64_t tokens, head_size, group;  // group: query heads per key/value head
  std::int64_t qkv_stride, y_stride;
  float scale;  // of the scores: 1 / sqrt(head_size)
  // Dropout of the probabilities; threshold 0: none. Element (h T + t) T + s of the sequence is probability s of row t
  // of head h.
  std::uint32_t threshold;
  float keep_scale;
  std::uint32_t key[2];
  std::uint64_t sequence;
  std::int64_t first_head;
};
template <class T>
struct AttentionForward {
  AttentionShape shape;
  const T *q, *k, *v;  // of token 0; query head g of the group is q + g head_size
  T* y;
  float* lse;      // [group, tokens]
  float* scratch;  // attention_scratch(...) floats
};
template <class T>
struct AttentionBackward {
  AttentionShape shape;
  const T *q, *k, *v, *y;
  const float* lse;
  const T* dy;
  T *dq, *dk, *dv;  // written; stride qkv_stride
  float* scratch;
};

template <class T>
struct ElementKernels {
  void (*add)(T* y, const T* a, const T* b, std::int64_t n);
  void (*gelu)(T* y, const T* x, std::int64_t n);
  void (*gelu_backward)(T* dx, const T* x, const T* dy, std::int64_t n);
  void (*swiglu)(T* y, const T* gate, const T* up, std::int64_t n);
  void (*swiglu_backward)(T* dgate, T* dup, const T* gate, const T* up, const T* dy,
                          std::int64_t n);  // dgate, dup: may be null
  void (*dropout)(T* y, const T* x, std::int64_t n, const RandomRow& row, std::uint32_t threshold, float scale);

  void (*fill_rows)(T* y, const T* row, std::int64_t rows, std::int64_t cols);
  void (*add_column_sums)(float* sums, const T* x, std::int64_t rows, std::int64_t cols,
                          std::int64_t stride);  // sums[c] += sum over rows

  void (*layer_norm)(T* y, const T* x, const T* gain, const T* bias, std::int64_t rows, std::int64_t cols, float eps);
  void (*rms_norm)(T* y, const T* x, const T* gain, std::int64_t rows, std::int64_t cols, float eps);
  // dx may be null; dgain, dbias are added to and may be null; x is read only for dx and dgain.
  void (*layer_norm_backward)(T* dx, float* dgain, float* dbias, const T* x, const T* gain, const T* dy,
                              std::int64_t rows, std::int64_t cols, float eps);
  void (*rms_norm_backward)(T* dx, float* dgain, const T* x, const T* gain, const T* dy, std::int64_t rows,
                            std::int64_t cols, float eps);

  // Rotates `heads` heads of 2 half elements each: (a, b) -> (a cos - b sin, b cos + a sin), a and b half apart.
  void (*rotate_heads)(T* y, const T* x, const float* cosine, const float* sine, std::int64_t heads, std::int64_t half);

  void (*attention_forward)(const AttentionForward<T>& task);
  void (*attention_backward)(const AttentionBackward<T>& task);
};

struct Kernels {
  ElementKernels<float> fp32;
  ElementKernels<Bf16> bf16;
  void (*round)(Bf16* y, const float* x, std::int64_t n);
  void (*widen)(float* y, const Bf16* x, std::int64_t n);

  std::int64_t (*attention_scratch)(std::int64_t tokens, std::int64_t head_size, bool backward);  // floats

  // Cross-entropy of one row of logits, in nats.
  float (*token_loss)(const float* logits, std::int64_t vocab, std::int64_t target);
  // The same, and the row becomes weight (softmax - one_hot(target)).
  float (*token_loss_gradient)(float* logits, std::int64_t vocab, std::int64_t target, float weight);

  void (*adamw)(float* p, float* m, float* v, const float* g, std::int64_t n, const AdamWFactors& f);
  void (*sgd)(float* p, float* momentum, const float* g, std::int64_t n, float gradient_scale, float decay, float lr,
              float mu);  // momentum may be null
  double (*sum_of_squares)(const float* x, std::int64_t n);
  std::int64_t (*count_nonfinite)(const float* x, std::int64_t n);
};

}  // namespace regather
