// The arithmetic of operations on a GPU, fp32: what Kernels is on a CPU. A device that has it is asked for it by the
// operations (Device::gpu()); its functions are defined beside them, in tensor/ops/*.cu. Invariants: everything is
// enqueued on the compute stream and nothing is waited for, unless a result is returned; a result depends on the
// arguments' values and sizes alone, not on addresses; sums are added in an order that sizes decide, without atomics.
// It does not know tensors, parameters or tapes.
#pragma once
#include <cstdint>
#include <span>

#include "tensor/ops/gemm_types.h"
#include "tensor/ops/kernel_types.h"
#include "tensor/philox.h"

namespace regather {

struct AttentionSizes {  // qkv: [batch, tokens, (heads + 2 kv_heads) head_size]
  std::int64_t batch, tokens, heads, kv_heads, head_size;
};
struct RandomMask {  // 0 where a word is below the threshold, else scale; threshold 0: none
  std::uint32_t threshold;
  float scale;
  RngKey key;
};

class GpuOps {
 public:
  virtual ~GpuOps() = default;

  // Matrix products as in tensor/ops/gemm.h, times scale.
  virtual void gemm_nt(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c,
                       Into into, RowStrides strides = {}, float scale = 1) = 0;
  virtual void gemm_nn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c,
                       Into into, RowStrides strides = {}, float scale = 1) = 0;
  virtual void gemm_tn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c,
                       Into into, RowStrides strides = {}, float scale = 1) = 0;

  virtual void add(float* y, const float* a, const float* b, std::int64_t n) = 0;  // y may be a or b
  virtual void fill_rows(float* y, const float* row, std::int64_t rows, std::int64_t cols) = 0;
  virtual void add_column_sums(float* sums, const float* x, std::int64_t rows, std::int64_t cols) = 0;
  virtual void gelu(float* y, const float* x, std::int64_t n) = 0;
  virtual void gelu_backward(float* dx, const float* x, const float* dy, std::int64_t n) = 0;
  virtual void swiglu(float* y, const float* gate, const float* up, std::int64_t n) = 0;
  // dgate, dup: may be null.
  virtual void swiglu_backward(float* dgate, float* dup, const float* gate, const float* up, const float* dy,
                               std::int64_t n) = 0;
  virtual void dropout(float* y, const float* x, std::int64_t sequences, std::int64_t size, const RandomMask& mask) = 0;

  virtual void layer_norm(float* y, const float* x, const float* gain, const float* bias, std::int64_t rows,
                          std::int64_t cols, float eps) = 0;
  virtual void rms_norm(float* y, const float* x, const float* gain, std::int64_t rows, std::int64_t cols,
                        float eps) = 0;
  // dx may be null; dgain, dbias are added to and may be null; x is read only for dx and dgain.
  virtual void layer_norm_backward(float* dx, float* dgain, float* dbias, const float* x, const float* gain,
                                   const float* dy, std::int64_t rows, std::int64_t cols, float eps) = 0;
  virtual void rms_norm_backward(float* dx, float* dgain, const float* x, const float* gain, const float* dy,
                                 std::int64_t rows, std::int64_t cols, float eps) = 0;

  // sign: 1 rotates, -1 rotates back.
  virtual void rope(float* y, const float* x, const AttentionSizes& sizes, double theta, double sign) = 0;
  // y: [batch, tokens, heads head_size]; lse: [batch, heads, tokens].
  virtual void attention(float* y, float* lse, const float* qkv, const AttentionSizes& sizes,
                         const RandomMask& mask) = 0;
  virtual void attention_backward(float* dqkv, const float* qkv, const float* y, const float* lse, const float* dy,
                                  const AttentionSizes& sizes, const RandomMask& mask) = 0;

  // positions, dtable, dpositions may be null. A token outside [0, vocab) is reported by the device's next wait.
  virtual void embedding(float* x, const std::int32_t* tokens, const float* table, const float* positions,
                         std::int64_t batch, std::int64_t length, std::int64_t cols, std::int64_t vocab) = 0;
  virtual void embedding_backward(float* dtable, float* dpositions, const std::int32_t* tokens, const float* dx,
                                  std::int64_t batch, std::int64_t length, std::int64_t cols) = 0;

  // Cross-entropy of each row of logits, in nats; a target of -1: 0. With weights the row becomes weight (softmax -
  // one_hot(target)); weights may be null.
  virtual void token_losses(float* losses, float* logits, const std::int32_t* targets, const float* weights,
                            std::int64_t rows, std::int64_t vocab) = 0;

  virtual void adamw(float* p, float* m, float* v, const float* g, std::int64_t n, const AdamWFactors& factors) = 0;
  virtual void sgd(float* p, float* momentum, const float* g, std::int64_t n, float gradient_scale, float decay,
                   float lr, float mu) = 0;  // momentum may be null
  // These wait for their result.
  virtual double sum_of_squares(const float* x, std::int64_t n) = 0;
  virtual std::int64_t count_nonfinite(const float* x, std::int64_t n) = 0;
};

}  // namespace regather
