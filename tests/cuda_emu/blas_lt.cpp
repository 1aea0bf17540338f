// cuBLASLt: products whose epilogue adds a bias, in stream order. What is asked for has to give the same bits for the
// same call, so a search that allows sums in the result's type, or in an order of their own, is refused. An algorithm
// is for the sizes, types and alignments that it was found for, and for no others.
#include <cublasLt.h>

#include <array>
#include <cstring>

#include "tests/cuda_emu/products.h"

using cuda_emu::Matrix;
using cuda_emu::Product;
using cuda_emu::state;

namespace {

struct Operation {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  cublasOperation_t a_layout = CUBLAS_OP_N, b_layout = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  cudaDataType_t bias_type = CUDA_R_32F;
};
struct Layout {
  cudaDataType type;
  std::int64_t rows, cols, lead;
};
struct Preference {
  std::uint64_t workspace = 0;
  std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
  std::array<std::uint32_t, 4> alignments = {256, 256, 256, 256};  // of A, B, C, D
};

// The library's handles are of types of its own.
template <class T, class Handle>
T& as(Handle handle) {
  return *reinterpret_cast<T*>(handle);
}
template <class Handle, class T>
cublasStatus_t make(Handle* handle, T value) {
  *handle = reinterpret_cast<Handle>(new T(value));
  return CUBLAS_STATUS_SUCCESS;
}
template <class T, class Handle>
cublasStatus_t destroy(Handle handle) {
  delete reinterpret_cast<const T*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}
template <class T>
cublasStatus_t assign(T& to, const void* from, std::size_t bytes) {
  if (bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&to, from, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

Matrix matrix(const void* data, cublasLtMatrixLayout_t layout) {
  const auto& l = as<Layout>(layout);
  return {data, l.rows, l.cols, l.lead, l.type};
}

struct Problem {
  Matrix a, b, c;
  bool a_transposed, b_transposed;
  std::int64_t m() const { return a_transposed ? a.cols : a.rows; }
  std::int64_t k() const { return a_transposed ? a.rows : a.cols; }
  bool well_formed() const {
    const std::int64_t n = b_transposed ? b.rows : b.cols, k_of_b = b_transposed ? b.cols : b.rows;
    return a.well_formed() && b.well_formed() && c.well_formed() && a.type == b.type && m() > 0 && n > 0 && k() > 0 &&
           k() == k_of_b && c.rows == m() && c.cols == n;
  }
  // What an algorithm is found for.
  std::array<std::uint64_t, 4> sizes() const {
    return {static_cast<std::uint64_t>(m()), static_cast<std::uint64_t>(c.cols), static_cast<std::uint64_t>(k()),
            static_cast<std::uint64_t>(a.type) << 8 | static_cast<std::uint64_t>(c.type)};
  }
};
Problem problem(const Operation& op, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t d) {
  return {matrix(nullptr, a), matrix(nullptr, b), matrix(nullptr, d), op.a_layout != CUBLAS_OP_N,
          op.b_layout != CUBLAS_OP_N};
}
bool supported(const Operation& op, const Problem& p) {
  return op.compute == CUBLAS_COMPUTE_32F && op.scale == CUDA_R_32F && op.epilogue == CUBLASLT_EPILOGUE_BIAS &&
         op.bias_type == p.c.type;
}
bool same(cublasLtMatrixLayout_t x, cublasLtMatrixLayout_t y) {
  const auto &a = as<Layout>(x), &b = as<Layout>(y);
  return a.type == b.type && a.rows == b.rows && a.cols == b.cols && a.lead == b.lead;
}

}  // namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return make(handle, 0); }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return destroy<int>(handle); }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* op, cublasComputeType_t compute, cudaDataType_t scale) {
  return make(op, Operation{.compute = compute, .scale = scale});
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t op) { return destroy<Operation>(op); }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, std::size_t bytes) {
  auto& op = as<Operation>(desc);
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return assign(op.a_layout, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return assign(op.b_layout, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return assign(op.epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return assign(op.bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return assign(op.bias_type, value, bytes);
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, std::uint64_t rows,
                                          std::uint64_t cols, std::int64_t lead) {
  return make(layout, Layout{type, static_cast<std::int64_t>(rows), static_cast<std::int64_t>(cols), lead});
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return destroy<Layout>(layout); }

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return make(preference, Preference{});
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return destroy<Preference>(preference);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    std::size_t bytes) {
  auto& preference = as<Preference>(handle);
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return assign(preference.workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return assign(preference.reductions, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return assign(preference.alignments[0], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return assign(preference.alignments[1], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return assign(preference.alignments[2], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return assign(preference.alignments[3], value, bytes);
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t handle, int asked,
                                              cublasLtMatmulHeuristicResult_t results[], int* found) {
  const auto& op = as<Operation>(desc);
  const auto& preference = as<Preference>(handle);
  const Problem p = problem(op, a, b, d);
  *found = 0;
  if (asked < 1 || !p.well_formed() || !same(c, d)) return CUBLAS_STATUS_INVALID_VALUE;
  constexpr std::uint32_t kOtherBits = CUBLASLT_REDUCTION_SCHEME_INPLACE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
  if (!supported(op, p) || (preference.reductions & kOtherBits) != 0) return CUBLAS_STATUS_NOT_SUPPORTED;
  results[0] = {};
  std::ranges::copy(p.sizes(), results[0].algo.data);
  for (std::size_t i = 0; i < 4; ++i)
    results[0].algo.data[4] |= static_cast<std::uint64_t>(preference.alignments[i]) << (16 * i);
  results[0].algo.data[5] = preference.workspace;
  results[0].workspaceSize = preference.workspace;
  results[0].state = CUBLAS_STATUS_SUCCESS;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              std::size_t workspace_bytes, cudaStream_t stream) {
  const auto& op = as<Operation>(desc);
  const Problem p = problem(op, a_layout, b_layout, d_layout);
  if (!p.well_formed() || !same(c_layout, d_layout) || c != d || !op.bias) return CUBLAS_STATUS_INVALID_VALUE;
  if (!supported(op, p)) return CUBLAS_STATUS_NOT_SUPPORTED;
  const auto sizes = p.sizes();
  if (!algorithm || !std::equal(sizes.begin(), sizes.end(), algorithm->data) || workspace_bytes < algorithm->data[5])
    return CUBLAS_STATUS_INVALID_VALUE;
  const std::array<const void*, 5> addresses = {a, b, c, d, op.bias};  // the bias is as aligned as D
  for (std::size_t i = 0; i < addresses.size(); ++i)
    if (reinterpret_cast<std::uintptr_t>(addresses[i]) %
        (algorithm->data[4] >> (16 * std::min<std::size_t>(i, 3)) & 0xFFFF))
      return CUBLAS_STATUS_NOT_SUPPORTED;
  if (state().host().context->failed) return CUBLAS_STATUS_EXECUTION_FAILED;
  if (!state().check(workspace, workspace_bytes, "cuBLASLt workspace")) return CUBLAS_STATUS_INVALID_VALUE;
  const Product product = {
      .a = matrix(a, a_layout),
      .b = matrix(b, b_layout),
      .c = matrix(d, d_layout),
      .a_transposed = p.a_transposed,
      .b_transposed = p.b_transposed,
      .alpha = *static_cast<const float*>(alpha),
      .beta = *static_cast<const float*>(beta),
      .bias = op.bias,
  };
  state().enqueue(stream, "matrix product with a bias", [product] { product.compute(); });
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
