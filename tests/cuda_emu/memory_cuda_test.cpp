// Memory on the emulator: its capacity, its order in streams, and the faults of frees and copies.
#include "tests/cuda_emu/example_kernels.h"
#include "tests/cuda_emu/on_machine.h"

namespace cuda_emu::testing {
namespace {

using examples::add_one;

class Memory : public ::testing::Test {
 protected:
  Machine machine{{.seed = 1, .capacity = 4096}};  // nothing runs before the host waits
  cudaStream_t stream = new_stream();
};

TEST_F(Memory, ends_at_the_capacity) {
  void *a = nullptr, *b = nullptr;
  ok(cudaMalloc(&a, 4000));
  EXPECT_EQ(cudaMalloc(&b, 4000), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  ok(cudaFree(a));
  ok(cudaMalloc(&b, 4000));
  EXPECT_EQ(machine.used_bytes(0), 4096U);
}

TEST_F(Memory, a_double_free_is_found) {
  void* a = nullptr;
  ok(cudaMalloc(&a, 4));
  cudaFree(a);
  cudaFree(a);
  expect_findings(machine, {"double free of allocation 0"});
}

TEST_F(Memory, a_free_inside_a_block_is_found) {
  cudaFree(on_device(4) + 1);
  expect_findings(machine, {"free of a pointer that was not allocated"});
}

TEST_F(Memory, a_copy_past_the_end_is_found) {
  float* x = on_device(4);
  upload(x, counting(5), 5, stream);
  cudaStreamSynchronize(stream);
  expect_findings(machine, {"copy host to device, target: out of bounds: 20 bytes at offset 0 of allocation 0"});
}

TEST_F(Memory, a_copy_past_the_end_of_pinned_memory_is_found) {
  float *x = on_device(5), *host = counting(4);
  EXPECT_EQ(cudaMemcpyAsync(x, host, 20, cudaMemcpyHostToDevice, stream), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpyAsync(host + 3, x, 8, cudaMemcpyDeviceToHost, stream), cudaErrorInvalidValue);
  expect_findings(machine, {"copy host to device, source: out of bounds: 20 bytes at offset 0 of 16 bytes of pinned",
                            "copy device to host, target: out of bounds: 8 bytes at offset 12 of 16 bytes of pinned"});
}

TEST_F(Memory, pinned_memory_freed_before_its_copy_is_found) {
  float *x = on_device(4), *host = counting(4);
  upload(x, host, 4, stream);
  ok(cudaFreeHost(host));
  cudaStreamSynchronize(stream);
  expect_findings(machine, {"copy host to device: use after free of pinned memory"});
}

TEST_F(Memory, freed_in_stream_order_it_is_usable_before_and_not_after) {
  void* x = nullptr;
  ok(cudaMallocAsync(&x, 16, stream));
  add_one(static_cast<float*>(x), 4, stream);
  ok(cudaFreeAsync(x, stream));
  cudaStreamSynchronize(stream);
  expect_findings(machine, {});
  add_one(static_cast<float*>(x), 4, stream);
  cudaStreamSynchronize(stream);
  expect_findings(machine, {"kernel add_one: load in block (0, 0, 0), thread 0: use after free of allocation 0"});
}

TEST_F(Memory, a_copy_with_pageable_memory_is_found) {
  std::vector<float> pageable(4);
  upload(on_device(4), pageable.data(), 4, stream);
  cudaStreamSynchronize(stream);
  expect_findings(machine, {"copy host to device of 16 bytes with memory that is not pinned"});
}

TEST_F(Memory, a_copy_in_the_other_direction_is_found) {
  EXPECT_EQ(cudaMemcpyAsync(on_device(4), on_device(4), 16, cudaMemcpyHostToDevice, stream),
            cudaErrorInvalidMemcpyDirection);
  expect_findings(machine, {"copy of 16 bytes is device to device, which is not what was asked for"});
}

}  // namespace
}  // namespace cuda_emu::testing
