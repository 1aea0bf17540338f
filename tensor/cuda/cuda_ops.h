// GpuOps on CUDA: each function is defined in the .cu file of its operation. What they share: the compute stream,
// cuBLAS, and a scratch buffer, whose contents live from one enqueued call to the next and no longer. Faults that only
// the device sees (a token outside the vocabulary) are noted there and thrown by throw_faults().
#pragma once
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tensor/cuda/status.h"
#include "tensor/memory.h"
#include "tensor/ops/gpu_ops.h"

namespace regather::cuda {

// Noted by the first thread that sees one. kind 0: none.
enum FaultKind : std::int32_t { kTokenOutsideVocabulary = 1, kTargetOutsideVocabulary };
struct Fault {
  std::int32_t kind, value, first, second, limit;
};

// y = a + b, in any stream.
void add(cudaStream_t stream, float* y, const float* a, const float* b, std::int64_t n);

class CudaOps final : public GpuOps {
 public:
  CudaOps(Allocator& memory, cudaStream_t compute);
  ~CudaOps() override;
  CudaOps(const CudaOps&) = delete;
  CudaOps& operator=(const CudaOps&) = delete;

  void gemm_nt(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c, Into into,
               RowStrides strides, float scale) override;
  void gemm_nn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c, Into into,
               RowStrides strides, float scale) override;
  void gemm_tn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c, Into into,
               RowStrides strides, float scale) override;
  void add(float* y, const float* a, const float* b, std::int64_t n) override;
  void fill_rows(float* y, const float* row, std::int64_t rows, std::int64_t cols) override;
  void add_column_sums(float* sums, const float* x, std::int64_t rows, std::int64_t cols) override;
  void gelu(float* y, const float* x, std::int64_t n) override;
  void gelu_backward(float* dx, const float* x, const float* dy, std::int64_t n) override;
  void swiglu(float* y, const float* gate, const float* up, std::int64_t n) override;
  void swiglu_backward(float* dgate, float* dup, const float* gate, const float* up, const float* dy,
                       std::int64_t n) override;
  void dropout(float* y, const float* x, std::int64_t sequences, std::int64_t size, const RandomMask& mask) override;
  void layer_norm(float* y, const float* x, const float* gain, const float* bias, std::int64_t rows, std::int64_t cols,
                  float eps) override;
  void rms_norm(float* y, const float* x, const float* gain, std::int64_t rows, std::int64_t cols, float eps) override;
  void layer_norm_backward(float* dx, float* dgain, float* dbias, const float* x, const float* gain, const float* dy,
                           std::int64_t rows, std::int64_t cols, float eps) override;
  void rms_norm_backward(float* dx, float* dgain, const float* x, const float* gain, const float* dy, std::int64_t rows,
                         std::int64_t cols, float eps) override;
  void rope(float* y, const float* x, const AttentionSizes& sizes, double theta, double sign) override;
  void attention(float* y, float* lse, const float* qkv, const AttentionSizes& sizes, const RandomMask& mask) override;
  void attention_backward(float* dqkv, const float* qkv, const float* y, const float* lse, const float* dy,
                          const AttentionSizes& sizes, const RandomMask& mask) override;
  void embedding(float* x, const std::int32_t* tokens, const float* table, const float* positions, std::int64_t batch,
                 std::int64_t length, std::int64_t cols, std::int64_t vocab) override;
  void embedding_backward(float* dtable, float* dpositions, const std::int32_t* tokens, const float* dx,
                          std::int64_t batch, std::int64_t length, std::int64_t cols) override;
  void token_losses(float* losses, float* logits, const std::int32_t* targets, const float* weights, std::int64_t rows,
                    std::int64_t vocab) override;
  void adamw(float* p, float* m, float* v, const float* g, std::int64_t n, const AdamWFactors& factors) override;
  void sgd(float* p, float* momentum, const float* g, std::int64_t n, float gradient_scale, float decay, float lr,
           float mu) override;
  double sum_of_squares(const float* x, std::int64_t n) override;
  std::int64_t count_nonfinite(const float* x, std::int64_t n) override;

  void throw_faults();  // waits

 private:
  enum class Layout { Plain, Transposed };
  void gemm(Layout a_layout, Layout b_layout, std::int64_t m, std::int64_t n, std::int64_t k, const float* a,
            const float* b, float* c, Into into, RowStrides strides, float scale);
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
  template <class T>
  T read(const T* from) {  // waits
    fetch(from, sizeof(T));
    return *host_.data<T>();
  }
  void fetch(const void* from, std::size_t bytes);  // into host_
  // to[c] += the sum over chunks of x[chunk stride + c], in their order.
  void add_partial_sums(float* to, const float* x, std::int64_t chunks, std::int64_t cols, std::int64_t stride);
  template <bool kCentred>
  void norm(float* y, const float* x, const float* gain, const float* bias, std::int64_t rows, std::int64_t cols,
            float eps);
  template <bool kCentred>
  void norm_backward(float* dx, float* dgain, float* dbias, const float* x, const float* gain, const float* dy,
                     std::int64_t rows, std::int64_t cols, float eps);

  cudaStream_t stream_;
  cublasHandle_t blas_ = nullptr;
  Buffer scratch_, blas_workspace_, faults_, host_;
};

}  // namespace regather::cuda
