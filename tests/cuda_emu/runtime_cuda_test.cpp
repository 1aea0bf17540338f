// Streams, events, memory, cuBLAS and NCCL on the emulator, over many seeds: right programs are right under every
// schedule, and each kind of fault is found.
#include <cstring>
#include <stdexcept>

#include "tests/cuda_emu/example_kernels.h"
#include "tests/cuda_emu/on_machine.h"

namespace cuda_emu::testing {
namespace {

using examples::add_one;

constexpr int kSeeds = 100;
const std::vector<std::string> kNone{};

// How many of the seeds f(machine) fails for.
template <class F>
int failures(F f) {
  int failed = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    Machine machine({.seed = static_cast<std::uint64_t>(seed), .devices = 2});
    failed += f(machine) ? 0 : 1;
  }
  return failed;
}

// ---- order ----------------------------------------------------------------------------------------------------------

enum class Waits { Yes, No };

bool copy_then_add(Waits waits) {
  const cudaStream_t copies = new_stream(), compute = new_stream();
  const cudaEvent_t copied = new_event();
  float* x = on_device(64);
  upload(x, counting(64), 64, copies);
  ok(cudaEventRecord(copied, copies));
  if (waits == Waits::Yes) ok(cudaStreamWaitEvent(compute, copied, 0));
  add_one(x, 64, compute);
  std::vector<float> right = counted<float>(65);
  right.erase(right.begin());
  return download(x, 64, compute) == right;
}

TEST(Streams, are_ordered_by_events) {
  EXPECT_EQ(failures([](Machine& machine) { return copy_then_add(Waits::Yes) && machine.findings().empty(); }), 0);
}
TEST(Streams, a_missing_event_gives_wrong_numbers_under_some_seeds) {
  const int wrong = failures([](Machine&) { return copy_then_add(Waits::No); });
  EXPECT_GT(wrong, kSeeds / 10);
}

// A buffer that goes from the gather stream to compute and back, as a slot does.
bool use_slot_twice(Waits waits) {
  const cudaStream_t gather = new_stream(), compute = new_stream();
  float *slot = on_device(64), *first = on_device(64), *second = on_device(64);
  const cudaEvent_t arrived = new_event(), read = new_event();
  float *a = counting(64), *b = pinned(64);
  std::memset(b, 0, 64 * sizeof(float));
  upload(slot, a, 64, gather);
  ok(cudaEventRecord(arrived, gather));
  ok(cudaStreamWaitEvent(compute, arrived, 0));
  ok(cudaMemcpyAsync(first, slot, 64 * sizeof(float), cudaMemcpyDeviceToDevice, compute));
  ok(cudaEventRecord(read, compute));
  if (waits == Waits::Yes) ok(cudaStreamWaitEvent(gather, read, 0));
  upload(slot, b, 64, gather);
  ok(cudaEventRecord(arrived, gather));
  ok(cudaStreamWaitEvent(compute, arrived, 0));
  ok(cudaMemcpyAsync(second, slot, 64 * sizeof(float), cudaMemcpyDeviceToDevice, compute));
  return download(first, 64, compute) == counted<float>(64) &&
         download(second, 64, compute) == std::vector<float>(64, 0.0F);
}

TEST(Streams, a_buffer_may_be_used_again_after_its_readers) {
  EXPECT_EQ(failures([](Machine&) { return use_slot_twice(Waits::Yes); }), 0);
}
TEST(Streams, a_buffer_used_again_too_early_gives_wrong_numbers) {
  EXPECT_GT(failures([](Machine&) { return use_slot_twice(Waits::No); }), kSeeds / 10);
}

TEST(Streams, a_host_that_does_not_wait_reads_too_early) {
  const auto read = [](Waits waits) {
    const cudaStream_t stream = new_stream();
    float *x = counting_on_device<float>(16, stream), *y = pinned(16);
    ok(cudaMemcpyAsync(y, x, 16 * sizeof(float), cudaMemcpyDeviceToHost, stream));
    if (waits == Waits::Yes) ok(cudaStreamSynchronize(stream));
    return std::vector<float>(y, y + 16) == counted<float>(16);
  };
  EXPECT_EQ(failures([&](Machine&) { return read(Waits::Yes); }), 0);
  EXPECT_GT(failures([&](Machine&) { return read(Waits::No); }), kSeeds / 10);
}

TEST(Streams, a_pinned_buffer_overwritten_too_early_is_seen) {
  const auto overwrite = [](Waits waits) {
    const cudaStream_t stream = new_stream();
    float *x = on_device(16), *from = counting(16);
    upload(x, from, 16, stream);
    if (waits == Waits::Yes) ok(cudaStreamSynchronize(stream));
    std::memset(from, 0, 16 * sizeof(float));
    return download(x, 16, stream) == counted<float>(16);
  };
  EXPECT_EQ(failures([&](Machine&) { return overwrite(Waits::Yes); }), 0);
  EXPECT_GT(failures([&](Machine&) { return overwrite(Waits::No); }), kSeeds / 10);
}

TEST(Streams, one_seed_is_one_interleaving) {
  const auto order = [](int seed) {
    Machine machine({.seed = static_cast<std::uint64_t>(seed)});
    const cudaStream_t stream = new_stream();
    int* next = on_device<int>(1);
    ok(cudaMemsetAsync(next, 0, sizeof(int), stream));
    std::string text;
    machine.run_ranks(3, [&](int rank) {
      for (int i = 0; i < 4; ++i) {
        text += static_cast<char>('0' + rank);
        yield();
      }
    });
    return text;
  };
  EXPECT_EQ(order(5), order(5));
  EXPECT_NE(order(5), order(6));
}

TEST(Streams, a_destroyed_one_runs_what_it_has_and_takes_nothing_more) {
  Machine machine({.seed = 1});  // nothing runs before the host waits
  const cudaStream_t stream = new_stream();
  float *x = on_device(4), *y = pinned(4);
  upload(x, counting(4), 4, stream);
  ok(cudaMemcpyAsync(y, x, 4 * sizeof(float), cudaMemcpyDeviceToHost, stream));
  ok(cudaStreamDestroy(stream));
  EXPECT_EQ(machine.ledger().copies.size(), 0U) << "it waited";
  add_one(x, 4, stream);
  expect_findings(machine, {"kernel add_one on a stream that does not exist"});
  ok(cudaDeviceSynchronize());
  EXPECT_EQ(std::vector<float>(y, y + 4), counted<float>(4));
}

// Rank 0's part of an all-gather that rank 1 never comes to.
ncclComm_t gather_alone(cudaStream_t stream) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  ncclComm_t comm = nullptr;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclCommInitRankConfig(&comm, 2, id, 0, &config);
  ncclAllGather(on_device(2), on_device(4), 2, ncclFloat32, comm, stream);
  return comm;
}

TEST(Streams, a_host_that_polls_for_ever_is_ended) {
  Machine machine;
  const cudaStream_t stream = new_stream();
  const cudaEvent_t event = new_event();
  const ncclComm_t comm = gather_alone(stream);
  ok(cudaEventRecord(event, stream));
  cudaError_t status = cudaErrorNotReady;
  while (status == cudaErrorNotReady) status = cudaEventQuery(event);
  EXPECT_EQ(status, cudaErrorLaunchFailure);
  expect_findings(machine,
                  {"deadlock: the host waits in cudaEventQuery; device 0 stream 0 is at AllGather of fp32 x 2"});
  ncclCommAbort(comm);
}

TEST(Streams, the_legacy_default_stream_is_a_finding) {
  Machine machine;
  add_one(on_device(4), 4, nullptr);
  expect_findings(machine, {"kernel add_one on the legacy default stream"});
}

TEST(Streams, a_wait_for_what_never_comes_is_named) {
  Machine machine;
  const cudaStream_t stream = new_stream();
  const cudaEvent_t event = new_event();
  machine.run_ranks(2, [&](int rank) {
    if (rank == 0) {
      gather_alone(stream);
      cudaEventRecord(event, stream);
      EXPECT_EQ(cudaEventSynchronize(event), cudaErrorLaunchFailure);
    }
  });
  ASSERT_EQ(machine.findings().size(), 1U);
  const std::string finding = machine.take_findings()[0];
  EXPECT_NE(finding.find("deadlock: rank 0 waits in cudaEventSynchronize; rank 1 has ended; device 0 stream 0 is at "
                         "AllGather of fp32 x 2"),
            std::string::npos)
      << finding;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

class Memory : public ::testing::Test {
 protected:
  Machine machine{{.capacity = 4096}};
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

TEST_F(Memory, freed_in_stream_order_it_is_usable_before_and_not_after) {
  void* x = nullptr;
  ok(cudaMallocAsync(&x, 16, stream));
  add_one(static_cast<float*>(x), 4, stream);
  ok(cudaFreeAsync(x, stream));
  cudaStreamSynchronize(stream);
  EXPECT_EQ(machine.findings(), kNone);
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

// ---- cuBLAS ---------------------------------------------------------------------------------------------------------

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
  EXPECT_EQ(machine.findings(), kNone);
  cublasGemmEx_64(handle, CUBLAS_OP_N, CUBLAS_OP_N, m, n, k + 1, &one, a, CUDA_R_32F, m, b, CUDA_R_32F, k + 1, &zero, c,
                  CUDA_R_32F, m, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  cudaStreamSynchronize(stream);
  expect_findings(machine, {"matrix product, A: out of bounds: 60 bytes at offset 0 of allocation 0, which has 48"});
  cublasDestroy_v2(handle);
}

// ---- NCCL -----------------------------------------------------------------------------------------------------------

struct Ranks {
  explicit Ranks(int n) : size(n) { ncclGetUniqueId(&id); }
  ncclComm_t join(int rank) const {
    ncclComm_t comm = nullptr;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    EXPECT_EQ(ncclCommInitRankConfig(&comm, size, id, rank, &config), ncclInProgress);
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) ncclCommGetAsyncError(comm, &state);
    return comm;
  }
  int size;
  ncclUniqueId id{};
};

// f(rank, its communicator, a stream) on so many ranks, a device each.
template <class F>
void run_collectives(Machine& machine, int size, F f) {
  const Ranks ranks(size);
  machine.run_ranks(size, [&](int rank) {
    ok(cudaSetDevice(rank));
    ncclComm_t comm = ranks.join(rank);
    f(rank, comm, new_stream());
  });
}

class Collectives : public Seeds {};

TEST_P(Collectives, gather_in_place_and_reduce_in_rank_order) {
  Machine machine(options());
  run_collectives(machine, 4, [&](int rank, ncclComm_t comm, cudaStream_t stream) {
    const cudaStream_t compute = new_stream();
    const cudaEvent_t arrived = new_event();
    float *full = on_device(12), *host = pinned(3);
    for (int i = 0; i < 3; ++i) host[i] = static_cast<float>(3 * rank + i);
    upload(full + 3 * rank, host, 3, stream);
    EXPECT_EQ(ncclAllGather(full + 3 * rank, full, 3, ncclFloat32, comm, stream), ncclSuccess);
    ok(cudaEventRecord(arrived, stream));
    ok(cudaStreamWaitEvent(compute, arrived, 0));
    EXPECT_EQ(download(full, 12, compute), counted<float>(12));
    float* mine = on_device(3);
    EXPECT_EQ(ncclReduceScatter(full, mine, 3, ncclFloat32, ncclSum, comm, stream), ncclSuccess);
    EXPECT_EQ(ncclAllReduce(full, full, 12, ncclFloat32, ncclSum, comm, stream), ncclSuccess);
    const float first = static_cast<float>(3 * rank);
    EXPECT_EQ(download(mine, 3, stream), (std::vector<float>{4 * first, 4 * first + 4, 4 * first + 8}));
    EXPECT_EQ(download(full, 12, stream)[11], 44.0F);
    ncclCommDestroy(comm);
  });
  EXPECT_EQ(machine.findings(), kNone);
  EXPECT_EQ(machine.ledger().collectives.at("AllGather").calls, 4);
  EXPECT_EQ(machine.ledger().collectives.at("AllGather").bytes, 4 * 3 * 12);
  EXPECT_EQ(machine.ledger().collectives.at("ReduceScatter").bytes, 4 * 3 * 12);
  EXPECT_EQ(machine.ledger().collectives.at("AllReduce").bytes, 4 * 2 * 48 * 3 / 4);
}

TEST_P(Collectives, a_reader_that_does_not_wait_for_the_gather_reads_too_early) {
  Machine machine(options());
  int wrong = 0;
  run_collectives(machine, 2, [&](int rank, ncclComm_t comm, cudaStream_t stream) {
    const cudaStream_t compute = new_stream();
    float* full = on_device(4);
    upload(full + 2 * rank, counting(2), 2, stream);
    ncclAllGather(full + 2 * rank, full, 2, ncclFloat32, comm, stream);
    wrong += download(full, 4, compute) == std::vector<float>{0, 1, 0, 1} ? 0 : 1;
  });
  EXPECT_GT(wrong, 0);
}

TEST_P(Collectives, in_another_order_on_one_rank_are_named) {
  Machine machine(options());
  run_collectives(machine, 2, [&](int rank, ncclComm_t comm, cudaStream_t stream) {
    float* x = on_device(8);
    for (const std::size_t n : rank == 0 ? std::vector<std::size_t>{2, 4} : std::vector<std::size_t>{4, 2})
      ncclAllReduce(x, x, n, ncclFloat32, ncclSum, comm, stream);
    cudaStreamSynchronize(stream);
  });
  EXPECT_TRUE(finds(machine, "calls AllReduce of fp32 x 4, rank"));
}

TEST_P(Collectives, that_one_rank_skips_are_named) {
  Machine machine(options());
  run_collectives(machine, 3, [&](int rank, ncclComm_t comm, cudaStream_t stream) {
    float* x = on_device(8);
    if (rank != 1) ncclAllReduce(x, x, 8, ncclFloat32, ncclSum, comm, stream);
    cudaStreamSynchronize(stream);
  });
  EXPECT_TRUE(finds(machine, "is at AllReduce of fp32 x 8"));
}

TEST_P(Collectives, posted_in_a_group_run_at_its_end) {
  Machine machine(options());
  run_collectives(machine, 2, [&](int, ncclComm_t comm, cudaStream_t stream) {
    float *a = counting_on_device<float>(4, stream), *b = counting_on_device<float>(2, stream);
    ncclGroupStart();
    ncclAllReduce(a, a, 4, ncclFloat32, ncclSum, comm, stream);
    ncclAllReduce(b, b, 2, ncclFloat32, ncclSum, comm, stream);
    ncclGroupEnd();
    EXPECT_EQ(download(a, 4, stream), (std::vector<float>{0, 2, 4, 6}));
    EXPECT_EQ(download(b, 2, stream), (std::vector<float>{0, 2}));
  });
  EXPECT_EQ(machine.findings(), kNone);
}

TEST_P(Collectives, that_fail_can_be_aborted) {
  Machine machine(options());
  machine.fail_collective(1, 0);
  run_collectives(machine, 2, [&](int, ncclComm_t comm, cudaStream_t stream) {
    float* x = on_device(2);
    ncclAllReduce(x, x, 2, ncclFloat32, ncclSum, comm, stream);
    ncclResult_t error = ncclSuccess;
    while (error == ncclSuccess) ncclCommGetAsyncError(comm, &error), yield();
    EXPECT_EQ(error, ncclRemoteError);
    ncclCommAbort(comm);
    ok(cudaStreamSynchronize(stream));
  });
  EXPECT_EQ(machine.findings(), kNone);
}

INSTANTIATE_TEST_SUITE_P(Seeds, Collectives, ::testing::Range(0, 8));

TEST(RunRanks, an_exception_of_a_rank_leaves_run_ranks) {
  Machine machine;
  EXPECT_THROW(machine.run_ranks(2,
                                 [](int rank) {
                                   if (rank == 1) throw std::runtime_error("rank 1");
                                 }),
               std::runtime_error);
}

}  // namespace
}  // namespace cuda_emu::testing
