// cuBLAS on the emulator: what products compute in every layout, and which arguments are refused.
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

}  // namespace
}  // namespace cuda_emu::testing
