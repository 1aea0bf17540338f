// The signatures of the kernels. This header is included by code compiled for instruction sets that the processor may
// not have, so it must stay free of inline functions: the linker keeps one copy of those, and could keep the wrong one.
#pragma once
#include <cstdint>

namespace regather {

// n, rows, cols: elements. Matrices are row-major and dense unless a stride is named.

struct AdamWFactors {  // what is left of a step once everything scalar is computed, in double
  float gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, step_size, inverse_root_correction2, eps;
};

// Which Philox words a row of elements draws: element e of the sequence draws word e % 4 of counter e / 4.
struct RandomRow {
  std::uint32_t key[2];
  std::uint64_t sequence;
  std::uint64_t first;  // element of the sequence that the row begins with
};

// One sequence and one key/value head, with the query heads that share it. Strides are those of a token, in floats.
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
struct AttentionForward {
  AttentionShape shape;
  const float *q, *k, *v;  // of token 0; query head g of the group is q + g head_size
  float *y, *lse;          // lse: [group, tokens]
  float* scratch;          // attention_scratch(...) floats
};
struct AttentionBackward {
  AttentionShape shape;
  const float *q, *k, *v, *y, *lse, *dy;
  float *dq, *dk, *dv;  // written; stride qkv_stride
  float* scratch;
};

struct Kernels {
  void (*add)(float* y, const float* a, const float* b, std::int64_t n);
  void (*gelu)(float* y, const float* x, std::int64_t n);
  void (*gelu_backward)(float* dx, const float* x, const float* dy, std::int64_t n);
  void (*swiglu)(float* y, const float* gate, const float* up, std::int64_t n);
  void (*swiglu_backward)(float* dgate, float* dup, const float* gate, const float* up, const float* dy,
                          std::int64_t n);  // dgate, dup: may be null
  void (*dropout)(float* y, const float* x, std::int64_t n, const RandomRow& row, std::uint32_t threshold, float scale);

  void (*fill_rows)(float* y, const float* row, std::int64_t rows, std::int64_t cols);
  void (*add_column_sums)(float* sums, const float* x, std::int64_t rows, std::int64_t cols,
                          std::int64_t stride);  // sums[c] += sum over rows

  void (*layer_norm)(float* y, const float* x, const float* gain, const float* bias, std::int64_t rows,
                     std::int64_t cols, float eps);
  void (*rms_norm)(float* y, const float* x, const float* gain, std::int64_t rows, std::int64_t cols, float eps);
  // dx may be null; dgain, dbias are added to and may be null; x is read only for dx and dgain.
  void (*layer_norm_backward)(float* dx, float* dgain, float* dbias, const float* x, const float* gain, const float* dy,
                              std::int64_t rows, std::int64_t cols, float eps);
  void (*rms_norm_backward)(float* dx, float* dgain, const float* x, const float* gain, const float* dy,
                            std::int64_t rows, std::int64_t cols, float eps);

  // Rotates `heads` heads of 2 half floats each: (a, b) -> (a cos - b sin, b cos + a sin), a and b half apart.
  void (*rotate_heads)(float* y, const float* x, const float* cosine, const float* sine, std::int64_t heads,
                       std::int64_t half);

  std::int64_t (*attention_scratch)(std::int64_t tokens, std::int64_t head_size, bool backward);  // floats
  void (*attention_forward)(const AttentionForward& task);
  void (*attention_backward)(const AttentionBackward& task);

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
