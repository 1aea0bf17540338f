// cuBLAS: matrix products, in stream order. Arguments are judged as the library judges them.
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <fmt/format.h>

#include <algorithm>

#include "tests/cuda_emu/sanitizers.h"
#include "tests/cuda_emu/state.h"

using cuda_emu::state;

struct cublasContext {
  cudaStream_t stream = nullptr;
};

namespace {

struct Matrix {  // column-major, as cuBLAS has it
  const void* data;
  std::int64_t rows, cols, lead;
  cudaDataType type;

  std::int64_t element_bytes() const { return type == CUDA_R_16BF ? 2 : 4; }
  std::size_t span() const {
    return rows == 0 || cols == 0 ? 0 : static_cast<std::size_t>(((cols - 1) * lead + rows) * element_bytes());
  }
  bool well_formed() const {
    return (type == CUDA_R_32F || type == CUDA_R_16BF) && lead >= std::max<std::int64_t>(1, rows);
  }
  float at(std::int64_t row, std::int64_t col) const {
    const std::int64_t i = col * lead + row;
    return type == CUDA_R_16BF ? __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i])
                               : static_cast<const float*>(data)[i];
  }
  void put(std::int64_t row, std::int64_t col, float value) const {
    const std::int64_t i = col * lead + row;
    if (type == CUDA_R_16BF)
      static_cast<__nv_bfloat16*>(const_cast<void*>(data))[i] = __float2bfloat16(value);
    else
      static_cast<float*>(const_cast<void*>(data))[i] = value;
  }
  template <class F>
  void each_column(F f) const {
    const auto bytes = static_cast<std::size_t>(rows * element_bytes());
    for (std::int64_t c = 0; c < cols; ++c)
      f(static_cast<char*>(const_cast<void*>(data)) + c * lead * element_bytes(), bytes);
  }
};

// With the summed dimension innermost: [outer, inner].
std::vector<float> packed(const Matrix& m, bool inner_is_rows) {
  std::vector<float> out;
  out.reserve(static_cast<std::size_t>(m.rows * m.cols));
  const std::int64_t outer = inner_is_rows ? m.cols : m.rows, inner = inner_is_rows ? m.rows : m.cols;
  for (std::int64_t o = 0; o < outer; ++o)
    for (std::int64_t i = 0; i < inner; ++i) out.push_back(inner_is_rows ? m.at(i, o) : m.at(o, i));
  return out;
}

struct Product {
  Matrix a, b, c;
  bool a_transposed, b_transposed;
  float alpha, beta;

  void compute() const {
    cuda_emu::State& s = state();
    if (!s.check(a.data, a.span(), "matrix product, A") || !s.check(b.data, b.span(), "matrix product, B") ||
        !s.check(c.data, c.span(), "matrix product, C"))
      return;
    a.each_column(cuda_emu::will_read);
    b.each_column(cuda_emu::will_read);
    c.each_column(cuda_emu::will_write);
    const std::vector<float> left = packed(a, a_transposed), right = packed(b, !b_transposed);
    const auto k = static_cast<std::size_t>(a_transposed ? a.rows : a.cols);
    for (std::int64_t j = 0; j < c.cols; ++j)
      for (std::int64_t i = 0; i < c.rows; ++i) {
        const float *x = left.data() + static_cast<std::size_t>(i) * k,
                    *y = right.data() + static_cast<std::size_t>(j) * k;
        float sum = 0;
        for (std::size_t p = 0; p < k; ++p) sum += x[p] * y[p];
        c.put(i, j, beta == 0 ? alpha * sum : alpha * sum + beta * c.at(i, j));
      }
    ++s.ledger.products.calls;
    for (const Matrix* m : {&a, &b, &c}) s.ledger.products.bytes += m->rows * m->cols * m->element_bytes();
  }
};

}  // namespace

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
  state().enqueue(handle->stream, "matrix product", [product] { product.compute(); });
  return CUBLAS_STATUS_SUCCESS;
}
