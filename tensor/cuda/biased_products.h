// y = x w^T + a row in each row, as one product of cuBLASLt whose epilogue adds the row: y is written once. What the
// library chooses for a size it is asked for once, so that the same call gives the same bits.
#pragma once
#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <compare>
#include <cstdint>
#include <map>

#include "tensor/element.h"

namespace regather::cuda {

class BiasedProducts {
 public:
  // workspace: of the stream's products, wherever they come from; it outlives this.
  BiasedProducts(cudaStream_t stream, void* workspace, std::int64_t workspace_bytes);
  ~BiasedProducts();
  BiasedProducts(const BiasedProducts&) = delete;
  BiasedProducts& operator=(const BiasedProducts&) = delete;

  // x: [m, k], w: [n, k], bias: [n], y: [m, n], all elements of one type (fp32 or bf16). No size is 0.
  struct Arrays {
    const void *x, *w, *bias;
    void* y;
  };
  void multiply(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype, const Arrays& arrays);

 private:
  // What a choice is made for: alignments in bytes, up to those that vectorised accesses want.
  struct Kind {
    std::int64_t m, n, k;
    DType dtype;
    std::uint32_t x_aligned, w_aligned, y_aligned;  // y's: the bias's, too
    auto operator<=>(const Kind&) const = default;
  };
  struct Choice {
    cublasLtMatmulDesc_t product = nullptr;
    cublasLtMatrixLayout_t x = nullptr, w = nullptr, y = nullptr;
    cublasLtMatmulAlgo_t algorithm{};
    Choice() = default;
    ~Choice();
    Choice(const Choice&) = delete;
    Choice& operator=(const Choice&) = delete;
  };
  void choose(const Kind& kind, const void* bias, Choice& choice) const;

  cudaStream_t stream_;
  void* workspace_;
  std::size_t workspace_bytes_;
  cublasLtHandle_t handle_ = nullptr;
  std::map<Kind, Choice> choices_;
};

}  // namespace regather::cuda
