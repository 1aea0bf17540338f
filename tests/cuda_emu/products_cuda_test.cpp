// cuBLAS on the emulator: what products compute in every layout, and which arguments are refused.
#include <cublasLt.h>

#include "tests/cuda_emu/on_machine.h"

namespace cuda_emu::testing {
namespace {

TEST(Products, are_computed_in_stream_order_for_every_layout) {
  Machine machine;
  const cudaStream_t stream = new_stream();
  cublasHandle_t handle = nullptr;
  ASSERT_EQ(cublasCreate_v2(&handle), CUBLAS_STATUS_SUCCESS);
  cublasSetStream_v2(handle, stream);
  const std::int64_t m = 3, n = 2, k = 4;
  float *a = counting_on_device<float>(12, stream), *b = counting_on_device<float>(8, stream), *c = on_device(6);
  const float one = 1, zero = 0;
  for (const auto ta : {CUBLAS_OP_N, CUBLAS_OP_T})
    for (const auto tb : {CUBLAS_OP_N, CUBLAS_OP_T})
      for (const float beta : {0.0F, 1.0F}) {
        ok(cudaMemsetAsync(c, 0, 24, stream));
        ASSERT_EQ(cublasGemmEx_64(handle, ta, tb, m, n, k, &one, a, CUDA_R_32F, ta == CUBLAS_OP_N ? m : k, b,
                                  CUDA_R_32F, tb == CUBLAS_OP_N ? k : n, beta == 0 ? &zero : &one, c, CUDA_R_32F, m,
                                  CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                  CUBLAS_STATUS_SUCCESS);
        const std::vector<float> out = download(c, 6, stream);
        for (std::int64_t i = 0; i < m; ++i)
          for (std::int64_t j = 0; j < n; ++j) {
            float sum = 0;
            for (std::int64_t p = 0; p < k; ++p)
              sum += static_cast<float>((ta == CUBLAS_OP_N ? i + p * m : p + i * k) *
                                        (tb == CUBLAS_OP_N ? p + j * k : j + p * n));
            EXPECT_EQ(out[static_cast<std::size_t>(i + j * m)], sum);
          }
      }
  EXPECT_EQ(machine.ledger().products.calls, 8);
  EXPECT_EQ(cublasGemmEx_64(handle, CUBLAS_OP_N, CUBLAS_OP_N, m, n, k, &one, a, CUDA_R_32F, m - 1, b, CUDA_R_32F, k,
                            &zero, c, CUDA_R_32F, m, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
            CUBLAS_STATUS_INVALID_VALUE);
  expect_findings(machine, {});
  cublasGemmEx_64(handle, CUBLAS_OP_N, CUBLAS_OP_N, m, n, k + 1, &one, a, CUDA_R_32F, m, b, CUDA_R_32F, k + 1, &zero, c,
                  CUDA_R_32F, m, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  cudaStreamSynchronize(stream);
  expect_findings(machine, {"matrix product, A: out of bounds: 60 bytes at offset 0 of allocation 0, which has 48"});
  cublasDestroy_v2(handle);
}

// C[m,n] = A^T B + a column, all of them fp32 and column-major.
struct BiasedProduct {
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t op = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  cublasLtMatmulHeuristicResult_t found{};
  static constexpr std::uint64_t kWorkspace = 64;

  BiasedProduct(std::uint64_t m, std::uint64_t n, std::uint64_t k) {
    cublasLtCreate(&handle);
    cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    cublasLtMatrixLayoutCreate(&a, CUDA_R_32F, k, m, static_cast<std::int64_t>(k));
    cublasLtMatrixLayoutCreate(&b, CUDA_R_32F, k, n, static_cast<std::int64_t>(k));
    cublasLtMatrixLayoutCreate(&c, CUDA_R_32F, m, n, static_cast<std::int64_t>(m));
    cublasLtMatmulPreferenceCreate(&preference);
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspace);
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  }
  ~BiasedProduct() {
    cublasLtMatmulPreferenceDestroy(preference);
    for (const auto layout : {a, b, c}) cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulDescDestroy(op);
    cublasLtDestroy(handle);
  }
  BiasedProduct(const BiasedProduct&) = delete;
  BiasedProduct& operator=(const BiasedProduct&) = delete;
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) const {
    ASSERT_EQ(cublasLtMatmulDescSetAttribute(op, attribute, &value, sizeof value), CUBLAS_STATUS_SUCCESS);
  }
  template <class T>
  void prefer(cublasLtMatmulPreferenceAttributes_t attribute, const T& value) const {
    ASSERT_EQ(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value), CUBLAS_STATUS_SUCCESS);
  }
  cublasStatus_t search() {
    int count = 0;
    return cublasLtMatmulAlgoGetHeuristic(handle, op, a, b, c, c, preference, 1, &found, &count);
  }
  cublasStatus_t run(const float* x, const float* y, float* z, void* workspace, cudaStream_t stream) const {
    const float one = 1, zero = 0;
    return cublasLtMatmul(handle, op, &one, x, a, y, b, &zero, z, c, z, c, &found.algo, workspace, kWorkspace, stream);
  }
};

TEST(Products, with_a_bias_add_it_to_each_column) {
  Machine machine;
  const cudaStream_t stream = new_stream();
  const std::size_t m = 3, n = 2, k = 4;
  float *a = counting_on_device<float>(m * k, stream), *b = counting_on_device<float>(n * k, stream),
        *bias = counting_on_device<float>(m, stream), *c = on_device(m * n);
  void* const workspace = on_device(BiasedProduct::kWorkspace / sizeof(float));
  BiasedProduct product(m, n, k);
  product.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  ASSERT_EQ(product.search(), CUBLAS_STATUS_SUCCESS);
  ASSERT_EQ(product.run(a, b, c, workspace, stream), CUBLAS_STATUS_SUCCESS);
  const std::vector<float> out = download(c, m * n, stream);
  for (std::size_t i = 0; i < m; ++i)
    for (std::size_t j = 0; j < n; ++j) {
      std::size_t sum = i;
      for (std::size_t p = 0; p < k; ++p) sum += (p + i * k) * (p + j * k);
      EXPECT_EQ(out[i + j * m], static_cast<float>(sum));
    }
  EXPECT_EQ(machine.ledger().products.calls, 1);
  EXPECT_EQ(machine.ledger().products.bytes, static_cast<std::int64_t>((m * k + n * k + m * n + m) * sizeof(float)));
  expect_findings(machine, {});
  product.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias + 1);
  product.prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, std::uint32_t{4});
  ASSERT_EQ(product.search(), CUBLAS_STATUS_SUCCESS);
  ASSERT_EQ(product.run(a, b, c, workspace, stream), CUBLAS_STATUS_SUCCESS);
  cudaStreamSynchronize(stream);
  expect_findings(machine, {"matrix product, bias: out of bounds: 12 bytes at offset 4 of allocation 2, which has 12"});
}

TEST(Products, with_a_bias_are_refused_where_the_library_would_or_bits_would_differ) {
  Machine machine;
  const cudaStream_t stream = new_stream();
  float *x = counting_on_device<float>(64, stream), *z = on_device(64);
  void* const workspace = on_device(BiasedProduct::kWorkspace / sizeof(float));
  BiasedProduct product(4, 4, 4), other(4, 8, 4);
  EXPECT_EQ(product.run(x, x, z, workspace, stream), CUBLAS_STATUS_INVALID_VALUE) << "without a bias";
  product.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const float*>(x));
  EXPECT_EQ(product.run(x, x, z, workspace, stream), CUBLAS_STATUS_INVALID_VALUE) << "without an algorithm";
  ASSERT_EQ(product.search(), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(product.run(x + 1, x, z, workspace, stream), CUBLAS_STATUS_NOT_SUPPORTED) << "A is not so aligned";
  product.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const float*>(x + 1));
  EXPECT_EQ(product.run(x, x, z, workspace, stream), CUBLAS_STATUS_NOT_SUPPORTED) << "nor is the bias";
  ASSERT_EQ(other.search(), CUBLAS_STATUS_SUCCESS);
  other.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const float*>(x));
  other.found = product.found;
  EXPECT_EQ(other.run(x, x, z, workspace, stream), CUBLAS_STATUS_INVALID_VALUE) << "an algorithm for other sizes";
  product.prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_MASK});
  EXPECT_EQ(product.search(), CUBLAS_STATUS_NOT_SUPPORTED) << "sums in any order and type";
  product.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_16BF);
  product.prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE});
  EXPECT_EQ(product.search(), CUBLAS_STATUS_NOT_SUPPORTED) << "a bias of another type";
  expect_findings(machine, {});
}

}  // namespace
}  // namespace cuda_emu::testing
