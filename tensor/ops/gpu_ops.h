// The arithmetic of operations on a GPU: what Kernels is on a CPU. A device that has it is asked for it by the
// operations (Device::gpu()); its functions are defined beside them, in tensor/ops/*.cu. Invariants: everything is
// enqueued on the compute stream and nothing is waited for, unless a result is returned; a result depends on the
// arguments' values and sizes alone, not on addresses (a product of cuBLAS's also on their alignment); sums are added
// in an order that sizes decide, without atomics. It does not know tensors, parameters or tapes.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <type_traits>
#include <vector>

#include "tensor/ops/gemm_types.h"
#include "tensor/ops/kernel_types.h"
#include "tensor/philox.h"

namespace regather {

struct ConstElements;  // tensor/ops/gemm.h
struct Elements;

struct AttentionSizes {  // qkv: [batch, tokens, (heads + 2 kv_heads) head_size]
  std::int64_t batch, tokens, heads, kv_heads, head_size;
};
struct RandomMask {  // 0 where a word is below the threshold, else scale; threshold 0: none
  std::uint32_t threshold;
  float scale;
  RngKey key;
};

// T: float or Bf16, the elements of activations, of their gradients and of parameters. Arithmetic, statistics, losses
// and gradients of parameters are fp32; what is stored is rounded once.
template <class T>
class GpuElementOps {
 public:
  virtual ~GpuElementOps() = default;

  virtual void add(T* y, const T* a, const T* b, std::int64_t n) = 0;  // y may be a or b
  virtual void add_column_sums(float* sums, const T* x, std::int64_t rows, std::int64_t cols) = 0;
  virtual void gelu(T* y, const T* x, std::int64_t n) = 0;
  virtual void gelu_backward(T* dx, const T* x, const T* dy, std::int64_t n) = 0;
  virtual void swiglu(T* y, const T* gate, const T* up, std::int64_t n) = 0;
  // dgate, dup: may be null.
  virtual void swiglu_backward(T* dgate, T* dup, const T* gate, const T* up, const T* dy, std::int64_t n) = 0;
  virtual void dropout(T* y, const T* x, std::int64_t sequences, std::int64_t size, const RandomMask& mask) = 0;

  virtual void layer_norm(T* y, const T* x, const T* gain, const T* bias, std::int64_t rows, std::int64_t cols,
                          float eps) = 0;
  virtual void rms_norm(T* y, const T* x, const T* gain, std::int64_t rows, std::int64_t cols, float eps) = 0;
  // dx may be null; dgain, dbias are added to and may be null; x is read only for dx and dgain.
  virtual void layer_norm_backward(T* dx, float* dgain, float* dbias, const T* x, const T* gain, const T* dy,
                                   std::int64_t rows, std::int64_t cols, float eps) = 0;
  virtual void rms_norm_backward(T* dx, float* dgain, const T* x, const T* gain, const T* dy, std::int64_t rows,
                                 std::int64_t cols, float eps) = 0;

  // sign: 1 rotates, -1 rotates back.
  virtual void rope(T* y, const T* x, const AttentionSizes& sizes, double theta, double sign) = 0;
  // y: [batch, tokens, heads head_size]; lse: [batch, heads, tokens].
  virtual void attention(T* y, float* lse, const T* qkv, const AttentionSizes& sizes, const RandomMask& mask) = 0;
  virtual void attention_backward(T* dqkv, const T* qkv, const T* y, const float* lse, const T* dy,
                                  const AttentionSizes& sizes, const RandomMask& mask) = 0;

  // positions, dtable, dpositions may be null. A token outside [0, vocab) is reported by the device's next wait.
  virtual void embedding(T* x, const std::int32_t* tokens, const T* table, const T* positions, std::int64_t batch,
                         std::int64_t length, std::int64_t cols, std::int64_t vocab) = 0;
  virtual void embedding_backward(float* dtable, float* dpositions, const std::int32_t* tokens, const T* dx,
                                  std::int64_t batch, std::int64_t length, std::int64_t cols) = 0;

  // Cross-entropy of each row of logits, in nats; a target of -1: 0. With weights the row becomes weight (softmax -
  // one_hot(target)), as elements of type T from where it begins: their rows are as far apart as those of the logits.
  // weights may be null.
  virtual void token_losses(float* losses, float* logits, const std::int32_t* targets, const float* weights,
                            std::int64_t rows, std::int64_t vocab) = 0;
};

class GpuOps {
 public:
  virtual ~GpuOps() = default;

  virtual GpuElementOps<float>& fp32() = 0;
  virtual GpuElementOps<Bf16>& bf16() = 0;
  template <class T>
  GpuElementOps<T>& on() {
    if constexpr (std::is_same_v<T, float>)
      return fp32();
    else
      return bf16();
  }

  // Matrix products as in tensor/ops/gemm.h, times scale. A and B have elements of one type; C those, or fp32.
  virtual void gemm_nt(std::int64_t m, std::int64_t n, std::int64_t k, ConstElements a, ConstElements b, Elements c,
                       Into into, RowStrides strides = {}, float scale = 1) = 0;
  virtual void gemm_nn(std::int64_t m, std::int64_t n, std::int64_t k, ConstElements a, ConstElements b, Elements c,
                       Into into, RowStrides strides = {}, float scale = 1) = 0;
  virtual void gemm_tn(std::int64_t m, std::int64_t n, std::int64_t k, ConstElements a, ConstElements b, Elements c,
                       Into into, RowStrides strides = {}, float scale = 1) = 0;

  // y[m,n] = x[m,k] w[n,k]^T + bias[n] in each row, rounded once; all elements of one type.
  virtual void linear(std::int64_t m, std::int64_t n, std::int64_t k, ConstElements x, ConstElements w,
                      ConstElements bias, Elements y) = 0;

  virtual void adamw(float* p, float* m, float* v, const float* g, std::int64_t n, const AdamWFactors& factors) = 0;
  virtual void sgd(float* p, float* momentum, const float* g, std::int64_t n, float gradient_scale, float decay,
                   float lr, float mu) = 0;  // momentum may be null
  // These wait for their result.
  // between: called after each array's launches.
  virtual std::vector<double> sums_of_squares(std::span<const std::span<const float>> arrays,
                                              const std::function<void()>& between) = 0;
  virtual std::int64_t count_nonfinite(const float* x, std::int64_t n) = 0;
};

}  // namespace regather
