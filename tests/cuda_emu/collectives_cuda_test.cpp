// NCCL on the emulator, over many seeds: what collectives compute, what a ring sends, and the faults of ranks that do
// not agree.
#include <stdexcept>
#include <utility>

#include "tests/cuda_emu/on_machine.h"

namespace cuda_emu::testing {
namespace {

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
    if (comm) ncclCommDestroy(comm);
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
  });
  expect_findings(machine, {});
  EXPECT_EQ(machine.ledger().collectives.at("AllGather of fp32").calls, 4);
  EXPECT_EQ(machine.ledger().collectives.at("AllGather of fp32").bytes, 4 * 3 * 12);
  EXPECT_EQ(machine.ledger().collectives.at("ReduceScatter of fp32").bytes, 4 * 3 * 12);
  EXPECT_EQ(machine.ledger().collectives.at("AllReduce of fp32").bytes, 4 * 2 * 48 * 3 / 4);
}

TEST_P(Collectives, a_reader_that_does_not_wait_for_the_gather_reads_too_early) {
  const auto reads = [&] {
    Machine machine(options());
    int wrong = 0;
    run_collectives(machine, 2, [&](int rank, ncclComm_t comm, cudaStream_t stream) {
      const cudaStream_t compute = new_stream();
      float* full = on_device(4);
      upload(full + 2 * rank, counting(2), 2, stream);
      ncclAllGather(full + 2 * rank, full, 2, ncclFloat32, comm, stream);
      wrong += download(full, 4, compute) == std::vector<float>{0, 1, 0, 1} ? 0 : 1;
    });
    return wrong;
  };
  if (kSeesRaces)
    expect_race(reads);
  else
    EXPECT_GT(reads(), 0);
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
  expect_findings(machine, {});
}

TEST_P(Collectives, that_fail_can_be_aborted) {
  Machine machine(options());
  machine.fail_collective(1, 0);
  run_collectives(machine, 2, [&](int, ncclComm_t& comm, cudaStream_t stream) {
    float* x = on_device(2);
    ncclAllReduce(x, x, 2, ncclFloat32, ncclSum, comm, stream);
    ncclResult_t error = ncclSuccess;
    while (error == ncclSuccess) ncclCommGetAsyncError(comm, &error), yield();
    EXPECT_EQ(error, ncclRemoteError);
    ncclCommAbort(std::exchange(comm, nullptr));
    ok(cudaStreamSynchronize(stream));
  });
  expect_findings(machine, {});
}

INSTANTIATE_TEST_SUITE_P(Seeds, Collectives, ::testing::Range(0, seeds(kSeesRaces ? 2 : 8)));

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
