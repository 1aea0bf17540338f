// What a warp does as one with bf16 on the emulator: the product of matrices, whichever way the right one lies in
// memory, and faults.
#include "tests/cuda_emu/example_kernels.h"
#include "tests/cuda_emu/on_machine.h"

namespace cuda_emu::testing {
namespace {

using namespace examples;

constexpr int kSide = 16;

TEST(TensorCores, multiply_matrices_that_lie_either_way) {
  for (const ThreadOrder order : {ThreadOrder::Forward, ThreadOrder::Random}) {
    Machine machine({.order = order});
    const cudaStream_t stream = new_stream();
    float *values = pinned(2 * kSide * kSide), *a = on_device(kSide * kSide), *b = on_device(kSide * kSide),
          *c = on_device(kSide * kSide);
    for (int i = 0; i < 2 * kSide * kSide; ++i) values[i] = static_cast<float>(i * i % 23 - 11);
    const float *va = values, *vb = values + kSide * kSide;
    upload(a, va, kSide * kSide, stream);
    upload(b, vb, kSide * kSide, stream);
    for (const Right right : {Right::Plain, Right::Transposed}) {
      tensor_cores(c, a, b, right, stream);
      const std::vector<float> got = download(c, kSide * kSide, stream);
      for (int i = 0; i < kSide; ++i)
        for (int j = 0; j < kSide; ++j) {
          float sum = 0;
          for (int k = 0; k < kSide; ++k)
            sum += va[i * kSide + k] * (right == Right::Plain ? vb[k * kSide + j] : vb[j * kSide + k]);
          ASSERT_EQ(got[static_cast<std::size_t>(i * kSide + j)], sum) << i << ", " << j;
        }
    }
    EXPECT_EQ(machine.findings(), std::vector<std::string>{});
  }
}

TEST(TensorCores, round_to_nearest_and_ties_to_even) {
  Machine machine;
  const cudaStream_t stream = new_stream();
  float *values = pinned(2 * kSide * kSide), *a = on_device(kSide * kSide), *b = on_device(kSide * kSide),
        *c = on_device(kSide * kSide);
  std::fill_n(values, 2 * kSide * kSide, 0.0F);
  constexpr float kUnit = 1.0F / 128;  // in the last place of numbers from 1 to 2
  values[0] = 1 + kUnit / 2, values[kSide + 1] = 1 + 1.5F * kUnit, values[2 * kSide + 2] = -(1 + 0.51F * kUnit);
  for (int i = 0; i < 3; ++i) values[kSide * kSide + i * kSide + i] = 1;
  upload(a, values, kSide * kSide, stream);
  upload(b, values + kSide * kSide, kSide * kSide, stream);
  tensor_cores(c, a, b, Right::Plain, stream);
  const std::vector<float> got = download(c, kSide * kSide, stream);
  EXPECT_EQ(got[0], 1);
  EXPECT_EQ(got[kSide + 1], 1 + 2 * kUnit);
  EXPECT_EQ(got[2 * kSide + 2], -(1 + kUnit));
  EXPECT_EQ(machine.findings(), std::vector<std::string>{});
}

TEST(TensorCores, need_a_whole_warp_and_aligned_rows_in_shared_memory) {
  Machine machine;
  const cudaStream_t stream = new_stream();
  float* x = on_device(64);
  tensor_cores_of_half_a_warp(x, stream);
  cudaStreamSynchronize(stream);
  expect_findings(machine, {"a warp of 16 threads does what takes 32, at example_kernels.cu:"});
  matrix_outside_shared_memory(x, stream);
  cudaStreamSynchronize(stream);
  expect_findings(machine, {"16 bytes of a matrix are not in shared memory, in thread 0, at example_kernels.cu:"});
  misaligned_matrix(x, stream);
  cudaStreamSynchronize(stream);
  expect_findings(machine, {"16 bytes of a matrix are not aligned, in thread 0, at example_kernels.cu:"});
}

}  // namespace
}  // namespace cuda_emu::testing
