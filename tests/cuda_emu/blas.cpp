// cuBLAS: matrix products, in stream order. Arguments are judged as the library judges them.
#include <cublas_v2.h>

#include "tests/cuda_emu/products.h"

using cuda_emu::Product;
using cuda_emu::state;

struct cublasContext {
  cudaStream_t stream = nullptr;
};

extern "C" cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = new cublasContext;
  return CUBLAS_STATUS_SUCCESS;
}
extern "C" cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
extern "C" cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}
extern "C" cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void* workspace, std::size_t bytes) {
  return state().check(workspace, bytes, "cuBLAS workspace") ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}
extern "C" cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t mode) {
  // Sums of products are in fp32, as is said here; a library that was not told so may split and round them.
  return mode == CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}
extern "C" const char* cublasGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "success";
    case CUBLAS_STATUS_INVALID_VALUE: return "an unsupported value or parameter was passed to the function";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "the function failed to launch on the GPU";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "the functionality requested is not supported";
    default: return "emulated status";
  }
}
extern "C" cublasStatus_t cublasGemmEx_64(cublasHandle_t handle, cublasOperation_t a_layout, cublasOperation_t b_layout,
                                          std::int64_t m, std::int64_t n, std::int64_t k, const void* alpha,
                                          const void* a, cudaDataType a_type, std::int64_t a_lead, const void* b,
                                          cudaDataType b_type, std::int64_t b_lead, const void* beta, void* c,
                                          cudaDataType c_type, std::int64_t c_lead, cublasComputeType_t compute,
                                          cublasGemmAlgo_t) {
  if (compute != CUBLAS_COMPUTE_32F || a_type != b_type) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (m < 0 || n < 0 || k < 0 || !handle) return CUBLAS_STATUS_INVALID_VALUE;
  const bool a_transposed = a_layout != CUBLAS_OP_N, b_transposed = b_layout != CUBLAS_OP_N;
  const Product product = {
      .a = {a, a_transposed ? k : m, a_transposed ? m : k, a_lead, a_type},
      .b = {b, b_transposed ? n : k, b_transposed ? k : n, b_lead, b_type},
      .c = {c, m, n, c_lead, c_type},
      .a_transposed = a_transposed,
      .b_transposed = b_transposed,
      .alpha = *static_cast<const float*>(alpha),
      .beta = *static_cast<const float*>(beta),
  };
  if (!product.a.well_formed() || !product.b.well_formed() || !product.c.well_formed())
    return CUBLAS_STATUS_INVALID_VALUE;
  if (m == 0 || n == 0) return CUBLAS_STATUS_SUCCESS;
  if (state().host().context->failed) return CUBLAS_STATUS_EXECUTION_FAILED;
  state().enqueue(handle->stream, "matrix product", [product] { product.compute(); });
  return CUBLAS_STATUS_SUCCESS;
}
