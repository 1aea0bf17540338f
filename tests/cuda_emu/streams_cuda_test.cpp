// Streams, events and host waits on the emulator, over many seeds: right programs are right under every schedule, wrong
// ones give wrong numbers, and a wait for what never comes ends.
#include <algorithm>

#include "tests/cuda_emu/example_kernels.h"
#include "tests/cuda_emu/on_machine.h"

namespace cuda_emu::testing {
namespace {

using examples::add_one;

const int kSeeds = seeds(kSeesRaces ? 8 : 100);

// right(machine) under every schedule that is tried.
template <class F>
void expect_right(F right) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    Machine machine({.seed = static_cast<std::uint64_t>(seed), .devices = 2});
    EXPECT_TRUE(right() && machine.findings().empty()) << "seed " << seed;
  }
}
// A fault that a schedule can hide: not right() under some. Under ThreadSanitizer it is a race, whatever the schedule.
template <class F>
void expect_wrong(F right) {
  if (kSeesRaces) {
    expect_race([&] {
      const Machine machine({.seed = 1});
      right();
    });
    return;
  }
  int wrong = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    const Machine machine({.seed = static_cast<std::uint64_t>(seed)});
    wrong += right() ? 0 : 1;
  }
  EXPECT_GT(wrong, kSeeds / 10);
}

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
  expect_right([] { return copy_then_add(Waits::Yes); });
}
TEST(Streams, a_missing_event_gives_wrong_numbers_under_some_seeds) {
  expect_wrong([] { return copy_then_add(Waits::No); });
}

// An event that is recorded for two streams, of which one has nothing to do.
enum class Recorded { AgainAfterTheWait, AgainBeforeTheWait };

bool copy_then_add_by_an_event_of_two(Recorded recorded) {
  const cudaStream_t copies = new_stream(), idle = new_stream(), compute = new_stream();
  const cudaEvent_t event = new_event();
  float* x = on_device(64);
  upload(x, counting(64), 64, copies);
  ok(cudaEventRecord(event, copies));
  if (recorded == Recorded::AgainBeforeTheWait) ok(cudaEventRecord(event, idle));
  ok(cudaStreamWaitEvent(compute, event, 0));
  if (recorded == Recorded::AgainAfterTheWait) ok(cudaEventRecord(event, idle));
  add_one(x, 64, compute);
  std::vector<float> right = counted<float>(65);
  right.erase(right.begin());
  return download(x, 64, compute) == right;
}

TEST(Streams, wait_for_what_an_event_was_recorded_for_before_the_wait) {
  expect_right([] { return copy_then_add_by_an_event_of_two(Recorded::AgainAfterTheWait); });
}
TEST(Streams, are_not_ordered_by_an_earlier_record_of_the_event_that_they_wait_for) {
  const auto add = [] { return copy_then_add_by_an_event_of_two(Recorded::AgainBeforeTheWait); };
  if (kSeesRaces)
    return expect_race([&] {
      const Machine machine({.seed = 3});  // each piece runs as soon as it can: the earlier record, too
      add();
    });
  int wrong = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    const Machine machine({.seed = static_cast<std::uint64_t>(seed)});
    wrong += add() ? 0 : 1;
  }
  EXPECT_GT(wrong, 0);
}

// A buffer that goes from the gather stream to compute and back, as a slot does.
bool use_slot_twice(Waits waits) {
  const cudaStream_t gather = new_stream(), compute = new_stream();
  float *slot = on_device(64), *first = on_device(64), *second = on_device(64);
  const cudaEvent_t arrived = new_event(), read = new_event();
  float *a = counting(64), *b = pinned(64);
  std::fill_n(b, 64, 0.0F);
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
  expect_right([] { return use_slot_twice(Waits::Yes); });
}
TEST(Streams, a_buffer_used_again_too_early_gives_wrong_numbers) {
  expect_wrong([] { return use_slot_twice(Waits::No); });
}

TEST(Streams, a_host_that_does_not_wait_reads_too_early) {
  const auto read = [](Waits waits) {
    const cudaStream_t stream = new_stream();
    float *x = counting_on_device<float>(16, stream), *y = pinned(16);
    ok(cudaMemcpyAsync(y, x, 16 * sizeof(float), cudaMemcpyDeviceToHost, stream));
    if (waits == Waits::Yes) ok(cudaStreamSynchronize(stream));
    return std::vector<float>(y, y + 16) == counted<float>(16);
  };
  expect_right([&] { return read(Waits::Yes); });
  expect_wrong([&] { return read(Waits::No); });
}

TEST(Streams, a_pinned_buffer_overwritten_too_early_is_seen) {
  const auto overwrite = [](Waits waits) {
    const cudaStream_t stream = new_stream();
    float *x = on_device(16), *from = counting(16);
    upload(x, from, 16, stream);
    if (waits == Waits::Yes) ok(cudaStreamSynchronize(stream));
    std::fill_n(from, 16, 0.0F);
    return download(x, 16, stream) == counted<float>(16);
  };
  expect_right([&] { return overwrite(Waits::Yes); });
  expect_wrong([&] { return overwrite(Waits::No); });
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

TEST(Streams, a_destroyed_event_is_a_finding) {
  Machine machine;
  const cudaEvent_t event = new_event();
  ok(cudaEventRecord(event, new_stream()));
  ok(cudaEventDestroy(event));
  EXPECT_NE(cudaEventSynchronize(event), cudaSuccess);
  expect_findings(machine, {"cudaEventSynchronize of an event that was destroyed"});
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
      const ncclComm_t comm = gather_alone(stream);
      cudaEventRecord(event, stream);
      EXPECT_EQ(cudaEventSynchronize(event), cudaErrorLaunchFailure);
      ncclCommAbort(comm);
    }
  });
  ASSERT_EQ(machine.findings().size(), 1U);
  const std::string finding = machine.take_findings()[0];
  EXPECT_NE(finding.find("deadlock: rank 0 waits in cudaEventSynchronize; rank 1 has ended; device 0 stream 0 is at "
                         "AllGather of fp32 x 2"),
            std::string::npos)
      << finding;
}

}  // namespace
}  // namespace cuda_emu::testing
