// GpuOps on CUDA: each function is defined in the .cu file of its operation, which instantiates those on elements for
// fp32 and bf16. What they share: the compute stream, cuBLAS, and a scratch buffer, whose contents live from one
// enqueued call to the next and no longer. Faults that only the device sees (a token outside the vocabulary) are noted
// there and thrown by throw_faults().
#pragma once
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "tensor/cuda/status.h"
#include "tensor/gpu_room.h"
#include "tensor/ops/gpu_ops.h"

namespace regather {
class Event;
}

namespace regather::cuda {

class Streams;
class BiasedProducts;

// Noted by the first thread that sees one. kind 0: none.
enum FaultKind : std::int32_t { kTokenOutsideVocabulary = 1, kTargetOutsideVocabulary };
struct Fault {
  std::int32_t kind, value, first, second, limit;
};

// What every operation computes with.
class OpContext {
 public:
  OpContext(Allocator& memory, cudaStream_t compute);
  cudaStream_t stream() const { return stream_; }
  Fault* faults() { return faults_.data<Fault>(); }
  // How many groups of n elements fit the scratch buffer; at least one is asked for.
  template <class T>
  std::int64_t room_for(std::int64_t n) const {
    return std::max<std::int64_t>(1, scratch_.bytes() / static_cast<std::int64_t>(sizeof(T)) / n);
  }
  template <class T>
  T* scratch(std::int64_t n) {  // n elements
    require_at_most("scratch bytes of one operation", n * static_cast<std::int64_t>(sizeof(T)), scratch_.bytes());
    return scratch_.data<T>();
  }
  // to[c] += the sum over chunks of x[chunk stride + c], in their order.
  void add_partial_sums(float* to, const float* x, std::int64_t chunks, std::int64_t cols, std::int64_t stride);

 private:
  cudaStream_t stream_;
  Buffer scratch_, faults_;
};

template <class T>
class CudaElementOps final : public GpuElementOps<T> {
 public:
  explicit CudaElementOps(OpContext& context) : context_(context) {}

  void add(T* y, const T* a, const T* b, std::int64_t n) override;
  void add_column_sums(float* sums, const T* x, std::int64_t rows, std::int64_t cols) override;
  void gelu(T* y, const T* x, std::int64_t n) override;
  void gelu_backward(T* dx, const T* x, const T* dy, std::int64_t n) override;
  void swiglu(T* y, const T* gate, const T* up, std::int64_t n) override;
  void swiglu_backward(T* dgate, T* dup, const T* gate, const T* up, const T* dy, std::int64_t n) override;
  void dropout(T* y, const T* x, std::int64_t sequences, std::int64_t size, const RandomMask& mask) override;
  void layer_norm(T* y, const T* x, const T* gain, const T* bias, std::int64_t rows, std::int64_t cols,
                  float eps) override;
  void rms_norm(T* y, const T* x, const T* gain, std::int64_t rows, std::int64_t cols, float eps) override;
  void layer_norm_backward(T* dx, float* dgain, float* dbias, const T* x, const T* gain, const T* dy, std::int64_t rows,
                           std::int64_t cols, float eps) override;
  void rms_norm_backward(T* dx, float* dgain, const T* x, const T* gain, const T* dy, std::int64_t rows,
                         std::int64_t cols, float eps) override;
  void rope(T* y, const T* x, const AttentionSizes& sizes, double theta, double sign) override;
  void attention(T* y, float* lse, const T* qkv, const AttentionSizes& sizes, const RandomMask& mask) override;
  void attention_backward(T* dqkv, const T* qkv, const T* y, const float* lse, const T* dy, const AttentionSizes& sizes,
                          const RandomMask& mask) override;
  void embedding(T* x, const std::int32_t* tokens, const T* table, const T* positions, std::int64_t batch,
                 std::int64_t length, std::int64_t cols, std::int64_t vocab) override;
  void embedding_backward(float* dtable, float* dpositions, const std::int32_t* tokens, const T* dx, std::int64_t batch,
                          std::int64_t length, std::int64_t cols) override;
  void token_losses(float* losses, float* logits, const std::int32_t* targets, const float* weights, std::int64_t rows,
                    std::int64_t vocab) override;

 private:
  OpContext& context_;
};

class CudaOps final : public GpuOps {
 public:
  CudaOps(Allocator& memory, Streams& streams);
  ~CudaOps() override;
  CudaOps(const CudaOps&) = delete;
  CudaOps& operator=(const CudaOps&) = delete;

  GpuElementOps<float>& fp32() override { return fp32_; }
  GpuElementOps<Bf16>& bf16() override { return bf16_; }
  void gemm_nt(std::int64_t m, std::int64_t n, std::int64_t k, ConstElements a, ConstElements b, Elements c, Into into,
               RowStrides strides, float scale) override;
  void gemm_nn(std::int64_t m, std::int64_t n, std::int64_t k, ConstElements a, ConstElements b, Elements c, Into into,
               RowStrides strides, float scale) override;
  void gemm_tn(std::int64_t m, std::int64_t n, std::int64_t k, ConstElements a, ConstElements b, Elements c, Into into,
               RowStrides strides, float scale) override;
  void linear(std::int64_t m, std::int64_t n, std::int64_t k, ConstElements x, ConstElements w, ConstElements bias,
              Elements y) override;
  void adamw(float* p, float* m, float* v, const float* g, std::int64_t n, const AdamWFactors& factors) override;
  void sgd(float* p, float* momentum, const float* g, std::int64_t n, float gradient_scale, float decay, float lr,
           float mu) override;
  std::vector<double> sums_of_squares(std::span<const std::span<const float>> arrays,
                                      const std::function<void()>& between) override;
  std::int64_t count_nonfinite(const float* x, std::int64_t n) override;

  // What operations that were enqueued before the first call found wrong is thrown by the second one; between them, the
  // event is waited for.
  Event fetch_faults();
  void throw_faults();

 private:
  enum class Layout { Plain, Transposed };
  struct Sizes {
    std::int64_t m, n, k;
  };
  void gemm(Layout a_layout, Layout b_layout, const Sizes& sizes, const ConstElements& a, const ConstElements& b,
            const Elements& c, Into into, RowStrides strides, float scale);
  const void* fetch(const void* from, std::size_t bytes);  // waits; where the bytes are until the next call

  Streams& streams_;
  OpContext context_;
  CudaElementOps<float> fp32_;
  CudaElementOps<Bf16> bf16_;
  cublasHandle_t blas_ = nullptr;
  Buffer blas_workspace_, results_, found_;          // of the host: the last two
  std::unique_ptr<BiasedProducts> biased_products_;  // in the same workspace: all of them run in the compute stream
};

// In any stream: y = a + b, of fp32 or bf16 elements; to = from, rounded (tensor/cuda/round.cu).
template <class T>
void add(cudaStream_t stream, T* y, const T* a, const T* b, std::int64_t n);
void round(cudaStream_t stream, Bf16* to, const float* from, std::int64_t n);

}  // namespace regather::cuda
