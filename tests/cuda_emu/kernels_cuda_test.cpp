// Kernels on the emulator: what they compute, in every order of threads, and which of their faults it finds.
#include <cmath>
#include <stdexcept>

#include "tensor/error.h"
#include "tests/cuda_emu/example_kernels.h"
#include "tests/cuda_emu/on_machine.h"

namespace cuda_emu::testing {
namespace {

using namespace examples;

class Kernels : public ::testing::TestWithParam<ThreadOrder> {
 protected:
  void TearDown() override {
    cudaDeviceSynchronize();
    EXPECT_EQ(machine.findings(), std::vector<std::string>{});
  }
  Machine machine{{.order = GetParam()}};
  cudaStream_t stream = new_stream();
};

TEST_P(Kernels, cover_every_thread_of_every_block) {
  int* to = on_device<int>(48);
  ok(cudaMemsetAsync(to, 0, 48 * sizeof(int), stream));
  whole_block_index(to, stream);
  EXPECT_EQ(download(to, 48, stream), std::vector<int>(48, 1));
}

TEST_P(Kernels, exchange_through_shared_memory) {
  const int rows = 37, cols = 50;
  float *x = counting_on_device<float>(rows * cols, stream), *y = on_device(rows * cols);
  examples::transpose(y, x, rows, cols, stream);
  const std::vector<float> out = download(y, rows * cols, stream);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < cols; ++c)
      ASSERT_EQ(out[static_cast<std::size_t>(c * rows + r)], static_cast<float>(r * cols + c));
}

TEST_P(Kernels, add_up_by_shuffles) {
  float *x = counting_on_device<float>(3 * 128, stream), *sums = on_device(3);
  block_sums(sums, x, 3, 128, stream);
  EXPECT_EQ(download(sums, 3, stream), (std::vector<float>{8128, 24512, 40896}));
}

TEST_P(Kernels, read_other_lanes) {
  int* to = on_device<int>(32);
  rotate_in_warp(to, 5, stream);
  const std::vector<int> out = download(to, 32, stream);
  for (int lane = 0; lane < 32; ++lane) EXPECT_EQ(out[static_cast<std::size_t>(lane)], (lane + 5) % 32);
}

TEST_P(Kernels, vote) {
  int* values = pinned<int>(40);
  for (int i = 0; i < 40; ++i) values[i] = i % 3 == 0 ? 1 : 0;
  int *x = on_device<int>(40), *to = on_device<int>(3);
  upload(x, values, 40, stream);
  votes(to, x, 40, stream);
  EXPECT_EQ(download(to, 3, stream), (std::vector<int>{1, 0, 0x49249249}));
}

TEST_P(Kernels, add_atomically) {
  int* to = on_device<int>(1);
  ok(cudaMemsetAsync(to, 0, sizeof(int), stream));
  count_atomically(to, 5, 70, stream);
  EXPECT_EQ(download(to, 1, stream), std::vector<int>{350});
}

TEST_P(Kernels, add_atomically_in_shared_memory) {
  int* to = on_device<int>(1);
  count_in_block(to, 70, stream);
  EXPECT_EQ(download(to, 1, stream), std::vector<int>{70});
}

TEST_P(Kernels, agree_in_a_warp_that_is_not_full) {
  int* to = on_device<int>(20);
  agree(to, 20, 20, stream);
  EXPECT_EQ(download(to, 20, stream), std::vector<int>(20, 1));
  agree(to, 20, 7, stream);
  EXPECT_EQ(download(to, 20, stream), std::vector<int>(20, 0));
}

TEST_P(Kernels, have_dynamic_shared_memory) {
  float* x = counting_on_device<float>(100, stream);
  dynamic_reverse(x, 100, stream);
  EXPECT_EQ(download(x, 100, stream).front(), 99.0F);
}

INSTANTIATE_TEST_SUITE_P(Orders, Kernels,
                         ::testing::Values(ThreadOrder::Forward, ThreadOrder::Reverse, ThreadOrder::Random),
                         [](const auto& order) {
                           return order.param == ThreadOrder::Forward   ? "forward"
                                  : order.param == ThreadOrder::Reverse ? "reverse"
                                                                        : "random";
                         });

class KernelFaults : public ::testing::Test {
 protected:
  Machine machine;
  cudaStream_t stream = new_stream();
  float* x = counting_on_device<float>(256, stream);
  float* y = on_device(256);
};

TEST_F(KernelFaults, a_missing_syncthreads_gives_wrong_numbers) {
  if (kSeesRaces)
    return expect_race([&] {
      missing_syncthreads(y, x, 128, stream);
      cudaStreamSynchronize(stream);
    });
  missing_syncthreads(y, x, 128, stream);
  const std::vector<float> out = download(y, 128, stream);
  for (int i = 0; i < 128; ++i) {  // threads run in order, each to its end: the first 95 read what nobody has written
    const float got = out[static_cast<std::size_t>(i)];
    if (i < 95)
      EXPECT_TRUE(std::isnan(got)) << i;
    else
      EXPECT_EQ(got, static_cast<float>((i + 33) % 128)) << i;
  }
}

// All lanes have written when the shuffle returns, so only ThreadSanitizer can tell.
TEST_F(KernelFaults, a_missing_syncwarp_is_hidden_by_the_shuffle) {
  if (kSeesRaces)
    return expect_race([&] {
      missing_syncwarp(y, x, stream);
      cudaStreamSynchronize(stream);
    });
  missing_syncwarp(y, x, stream);
  EXPECT_EQ(download(y, 1, stream), std::vector<float>{31});
}

// Blocks run one after another, so only ThreadSanitizer can tell.
TEST_F(KernelFaults, blocks_that_add_to_one_place_without_an_atomic_give_the_sum_here) {
  const auto add = [&] {
    ok(cudaMemsetAsync(y, 0, sizeof(float), stream));
    race_between_blocks(y, 3, stream);
    return download(y, 1, stream);
  };
  if (kSeesRaces) return expect_race(add);
  EXPECT_EQ(add(), std::vector<float>{3});
}

TEST_F(KernelFaults, a_barrier_in_a_branch_is_found) {
  barrier_in_branch(x, stream);
  cudaStreamSynchronize(stream);
  expect_findings(machine, {"kernel barrier_in_branch: 24 of 64 threads ended before the __syncthreads at "
                            "example_kernels.cu:"});
}

TEST_F(KernelFaults, threads_at_different_barriers_are_found) {
  two_barriers(x, stream);
  cudaStreamSynchronize(stream);
  expect_findings(machine,
                  {"kernel two_barriers: threads of one block are at different barriers: example_kernels.cu:"});
}

TEST_F(KernelFaults, a_shuffle_in_a_branch_is_found) {
  shuffle_in_branch(x, stream);
  cudaStreamSynchronize(stream);
  expect_findings(machine,
                  {"kernel shuffle_in_branch: deadlock in block 0: of 32 threads 0 wait at __syncthreads, 20 for "
                   "other lanes, 12 have ended; warp 0 at example_kernels.cu:"});
}

TEST_F(KernelFaults, a_shuffle_from_outside_its_mask_is_found) {
  shuffle_outside_mask(x, stream);
  cudaStreamSynchronize(stream);
  expect_findings(machine, {"a shuffle reads lane 20, which is not in its mask 0000ffff"});
}

TEST_F(KernelFaults, a_shuffle_from_a_lane_that_does_not_exist_is_found) {
  shuffle_from_missing_lane(on_device<int>(20), stream);
  cudaStreamSynchronize(stream);
  expect_findings(machine, {"a shuffle reads lane 25 of a warp that has 20 threads, at example_kernels.cu:"});
}

TEST_F(KernelFaults, a_fault_while_others_wait_at_a_barrier_is_the_only_finding) {
  fault_before_barrier(x, 256, stream);
  cudaStreamSynchronize(stream);
  expect_findings(machine, {"kernel fault_before_barrier: store in block (0, 0, 0), thread 63: out of bounds"});
}

TEST_F(KernelFaults, an_atomic_past_the_end_is_found) {
  atomic_past_end(x, 256, stream);
  cudaStreamSynchronize(stream);
  expect_findings(machine, {"kernel atomic_past_end: atomic in block (0, 0, 0), thread 0: out of bounds: 4 bytes"});
}

TEST_F(KernelFaults, shared_memory_begins_as_nan) {
  reads_uninitialised_shared(y, stream);
  EXPECT_TRUE(std::isnan(download(y, 1, stream)[0]));
}

TEST_F(KernelFaults, a_store_past_the_end_is_found) {
  store_past_end(x, 256, stream);
  cudaStreamSynchronize(stream);
  expect_findings(machine,
                  {"kernel store_past_end: store in block (4, 0, 0), thread 0: out of bounds: 4 bytes at offset "
                   "1024 of allocation 0, which has 1024"});
}

TEST_F(KernelFaults, a_misaligned_load_is_found) {
  load_misaligned(y, x, stream);
  cudaStreamSynchronize(stream);
  expect_findings(machine, {"load in block (0, 0, 0), thread 0: misaligned: 16 bytes"});
}

TEST_F(KernelFaults, a_load_of_freed_memory_is_found) {
  ok(cudaFree(x));
  add_one(x, 1, stream);
  cudaStreamSynchronize(stream);
  expect_findings(machine, {"use after free of allocation 0"});
}

TEST_F(KernelFaults, a_pointer_of_the_host_is_found) {
  add_one(counting<float>(4), 4, stream);
  cudaStreamSynchronize(stream);
  expect_findings(machine, {"a pointer of the host"});
}

TEST_F(KernelFaults, a_launch_that_does_not_fit_is_refused) {
  try {
    too_many_threads(x, stream);
    FAIL();
  } catch (const regather::Error& e) {
    EXPECT_EQ(std::string(e.what()),
              "launch of too_many_threads: invalid configuration argument (cudaErrorInvalidConfiguration)");
  }
}

TEST_F(KernelFaults, dynamic_shared_memory_needs_a_limit_that_was_set_and_is_in_the_gpu) {
  constexpr int kKiB = 1024;
  share(y, 48 * kKiB, stream);
  EXPECT_EQ(download(y, 1, stream)[0], 48 * kKiB / 4.0F);
  EXPECT_THROW(share(y, 48 * kKiB + 4, stream), regather::Error);
  EXPECT_TRUE(let_share(100 * kKiB));
  share(y, 100 * kKiB, stream);
  EXPECT_EQ(download(y, 1, stream)[0], 100 * kKiB / 4.0F);
  EXPECT_THROW(share(y, 100 * kKiB + 4, stream), regather::Error);
  EXPECT_FALSE(let_share(163 * kKiB + 4)) << "more than sm_80 has";
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST_F(KernelFaults, static_and_dynamic_shared_memory_share_one_limit) {
  share_with_static(y, 8 << 10, stream);
  EXPECT_EQ(download(y, 1, stream)[0], 3.0F);
  share_with_static(y, (8 << 10) + 4, stream);
  cudaStreamSynchronize(stream);
  expect_findings(machine,
                  {"kernel share_with_static: 40960 bytes of static and 8196 of dynamic shared memory; a block "
                   "of this launch has 49152"});
}

using KernelFaultsDeathTest = KernelFaults;
TEST_F(KernelFaultsDeathTest, a_host_that_follows_a_device_pointer_dies) {
  cudaStreamSynchronize(stream);
  EXPECT_DEATH(*static_cast<volatile float*>(x) = 1.0F, "");
}

// Loads and stores are checked by the emulator, everything else by AddressSanitizer alone.
TEST_F(KernelFaultsDeathTest, a_store_past_the_end_without_the_helper_is_seen_by_addresssanitizer) {
  const auto write = [&] {
    plain_store_past_end(x, 256, stream);
    ok(cudaStreamSynchronize(stream));
  };
  if (kSeesAddresses)
    EXPECT_DEATH(write(), "AddressSanitizer: use-after-poison");
  else
    write();
  expect_findings(machine, {});
}

TEST(KernelCounts, an_atomic_loads_and_stores) {
  Machine machine;
  const cudaStream_t stream = new_stream();
  int* to = on_device<int>(1);
  ok(cudaMemsetAsync(to, 0, sizeof(int), stream));
  count_atomically(to, 2, 32, stream);
  cudaStreamSynchronize(stream);
  const KernelCounts& counts = machine.ledger().kernels.at("count_atomically");
  EXPECT_EQ(counts.loaded, 256);
  EXPECT_EQ(counts.stored, 256);
  EXPECT_EQ(counts.loaded_sectors, 2);
}

TEST(KernelCounts, are_bytes_and_sectors_of_the_accesses) {
  Machine machine;
  const cudaStream_t stream = new_stream();
  float *x = counting_on_device<float>(1024, stream), *y = on_device(1024);
  copy_strided(y, x, 128, 1, stream);
  copy_by_four(y, x, 1024, stream);
  cudaStreamSynchronize(stream);
  const KernelCounts& plain = machine.ledger().kernels.at("copy_strided");
  EXPECT_EQ(plain.launches, 1);
  EXPECT_EQ(plain.loaded, 512);
  EXPECT_EQ(plain.stored, 512);
  EXPECT_EQ(plain.loaded_sectors, 16);
  EXPECT_EQ(plain.stored_sectors, 16);
  const KernelCounts& packed = machine.ledger().kernels.at("copy_by_four");
  EXPECT_EQ(packed.loaded, 4096);
  EXPECT_EQ(packed.loaded_sectors, 128);
  copy_strided(y, x, 128, 8, stream);
  cudaStreamSynchronize(stream);
  EXPECT_EQ(machine.ledger().kernels.at("copy_strided").loaded_sectors, 16 + 128) << "a sector for each element";
  EXPECT_EQ(machine.ledger().copies.at("host to device").bytes, 4096);
  EXPECT_EQ(machine.findings(), std::vector<std::string>{});
}

}  // namespace
}  // namespace cuda_emu::testing
