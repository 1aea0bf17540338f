// Communicators of GPUs' memory on the emulator: conformance, and ranks that fail, are gone, or share a GPU.
#include <atomic>

#include "tensor/ops/optimizer.h"
#include "tests/dist/communicator_conformance.h"
#include "tests/dist/cuda_ranks.h"
#include "tests/dist/outcome.h"
#include "tests/dist/through_device.h"
#include "tests/tensor/cuda/on_device.h"

namespace regather::conformance {
namespace {

using namespace std::chrono_literals;
using regather::testing::Gpus;
using regather::testing::MakeTransport;
using regather::testing::run_cuda_ranks;
using regather::testing::ThroughDevice;

const std::vector<std::string> kNone{};

std::unique_ptr<Transport> make_staged(std::unique_ptr<Transport> below, int rank, int size) {
  return make_staged_transport(std::move(below), rank, size, std::int64_t{8} << 10);
}

// ---- conformance ----------------------------------------------------------------------------------------------------

Backend on_gpus(const std::string& name, int ranks, std::uint64_t seed, Gpus gpus) {
  return {name + std::to_string(ranks), [=](const SimOptions& options, const auto& body) {
            cuda_emu::Machine machine(
                {.seed = seed, .devices = ranks, .blocks_apart = 0, .guarded = false, .late_collectives = true});
            const auto through = [&](std::unique_ptr<Transport> below, int rank, int size) {
              auto inner = gpus == Gpus::OneEach
                               ? make_nccl_transport(std::move(below), rank, size)
                               : make_staged_transport(std::move(below), rank, size, options.chunk_bytes);
              return std::make_unique<ThroughDevice>(std::move(inner), size);
            };
            const auto on_device = [&](Communicator& comm, CudaDevice& device) {
              comm.use_memory_of(device);
              device.wait_with({});  // results come back inside of a poll
              body(comm);
            };
            run_cuda_ranks(machine, ranks, options, through, on_device, gpus);
            EXPECT_EQ(machine.findings(), kNone);
            EXPECT_EQ(machine.communicators(), 0);
          }};
}

INSTANTIATE_TEST_SUITE_P(Cuda, CommunicatorConformance,
                         ::testing::Values(on_gpus("nccl", 1, 4, Gpus::OneEach), on_gpus("nccl", 2, 1, Gpus::OneEach),
                                           on_gpus("nccl", 4, 2, Gpus::OneEach),
                                           on_gpus("staged", 2, 3, Gpus::OneForAll),
                                           on_gpus("staged", 3, 1, Gpus::OneForAll)),
                         name_of_backend);

// ---- what streams wait for ------------------------------------------------------------------------------------------

constexpr std::int64_t kShard = 10;

// A buffer that is gathered, and the collective.
struct Gather {
  Gather(Communicator& c, CudaDevice& device)
      : full(device.memory, c.size() * kShard * static_cast<std::int64_t>(sizeof(float)), Tag::Gathered) {
    device.wait(Stream::Gather, device.record(Stream::Compute));
    const std::vector<float> mine(kShard, static_cast<float>(c.rank()));
    device.write(Stream::Gather, full.data<float>() + c.rank() * kShard, mine.data(), kShard * 4);
    device.wait(Stream::Compute, device.record(Stream::Gather));  // memory is freed in the order of compute
    const GatherBuffer buffer{full.data(), kShard, DType::F32};
    arrival = c.all_gather({&buffer, 1}, kLabel);
  }
  // By the device, with what else it does; waits for the device alone.
  std::vector<float> read_in_order_of_compute(CudaDevice& device) const {
    device.wait(Stream::Compute, arrival);
    std::vector<float> copy(static_cast<std::size_t>(full.bytes()) / sizeof(float));
    device.read(Stream::Compute, copy.data(), full.data(), full.bytes());
    return copy;
  }
  Buffer full;
  Event arrival;
};

TEST(Nccl, a_stream_waits_for_a_gather_without_its_host) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    cuda_emu::Machine machine({.seed = seed, .devices = 2, .late_collectives = true});
    std::atomic<bool> enqueued = false;
    run_cuda_ranks(machine, 2, {}, make_nccl_transport, [&](Communicator& c, CudaDevice& device) {
      c.use_memory_of(device);
      while (c.rank() == 1 && !enqueued) cuda_emu::yield();
      const Gather gather(c, device);
      device.wait(Stream::Compute, gather.arrival);
      enqueued = true;  // before rank 1 has even come
      std::vector<float> expected(kShard, 0.0F);
      expected.resize(2 * kShard, 1.0F);
      EXPECT_EQ(gather.read_in_order_of_compute(device), expected) << "seed " << seed;
    });
    EXPECT_EQ(machine.findings(), kNone);
  }
}

TEST(Nccl, one_communicator_serves_every_device_on_the_same_gpu) {
  cuda_emu::Machine machine({.devices = 2});
  run_cuda_ranks(machine, 2, {}, make_nccl_transport, [&](Communicator& c, CudaDevice& device) {
    c.use_memory_of(device);
    {
      CudaDevice another(c.rank());
      c.use_memory_of(another);
      EXPECT_EQ(Gather(c, another).read_in_order_of_compute(another)[kShard], 1.0F);
      c.barrier(kLabel);
      EXPECT_EQ(machine.communicators(), 2);
      another.memory.set_limit(0);
    }
    c.use_memory_of(device);
    EXPECT_EQ(Gather(c, device).read_in_order_of_compute(device)[kShard], 1.0F);
  });
  EXPECT_EQ(machine.findings(), kNone);
  EXPECT_EQ(machine.communicators(), 0);
}

TEST(Staged, pinned_memory_is_two_pieces_a_lane) {
  cuda_emu::Machine machine({.devices = 1});
  run_cuda_ranks(
      machine, 3, {}, make_staged,
      [&](Communicator& c, CudaDevice& device) {
        c.use_memory_of(device);
        EXPECT_EQ(c.staging_bytes(), 2 * 2 * (3 + 1) * (8 << 10));
      },
      Gpus::OneForAll);
}

TEST(Staged, sums_in_flight_into_one_place_are_added_one_after_the_other) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    cuda_emu::Machine machine({.seed = seed, .devices = 1});
    const auto body = [&](Communicator& c, CudaDevice& device) {
      c.use_memory_of(device);
      const std::vector<float> ones(2 * kShard, 1.0F), twos(2 * kShard, 2.0F);
      const Buffer a = regather::testing::on_device(device, ones), b = regather::testing::on_device(device, twos),
                   sum = regather::testing::on_device(device, {ones.begin(), ones.begin() + kShard});
      device.wait(Stream::Reduce, device.record(Stream::Compute));
      const Event first = c.reduce_scatter(a.data<float>(), sum.data<float>(), kShard, kLabel);
      const Event second = c.reduce_scatter(b.data<float>(), sum.data<float>(), kShard, kLabel);
      first.wait();
      second.wait();
      EXPECT_EQ(regather::testing::on_host(device, sum), std::vector<float>(kShard, 1.0F + 2.0F + 4.0F));
    };
    run_cuda_ranks(machine, 2, {}, make_staged, body, Gpus::OneForAll);
    EXPECT_EQ(machine.findings(), kNone);
  }
}

// ---- failures -------------------------------------------------------------------------------------------------------

using Body = std::function<void(Communicator&, CudaDevice&)>;

class GpuFailure : public ::testing::TestWithParam<const char*> {
 protected:
  ~GpuFailure() override {
    EXPECT_EQ(machine.findings(), kNone);
    EXPECT_EQ(machine.communicators(), 0);
    EXPECT_EQ(machine.used_bytes(0), 0U);
  }
  Outcome run(const Body& body, const SimOptions& options = {}) {
    const bool nccl = GetParam() == std::string("nccl");
    return {2, [&](const Outcome::Note& note) {
              run_cuda_ranks(
                  machine, 2, options, nccl ? MakeTransport(make_nccl_transport) : MakeTransport(make_staged),
                  [&](Communicator& c, CudaDevice& device) {
                    note(c.rank(), [&] {
                      c.use_memory_of(device);
                      EXPECT_EQ(Gather(c, device).read_in_order_of_compute(device)[kShard], 1.0F);
                      body(c, device);
                    });
                  },
                  nccl ? Gpus::OneEach : Gpus::OneForAll);
            }};
  }
  cuda_emu::Machine machine{
      {.seed = 1, .devices = 2, .most_vain_polls = std::int64_t{1} << 40, .late_collectives = true}};
};

TEST_P(GpuFailure, of_a_rank_ends_a_wait_for_the_device_with_its_reason_and_code) {
  const Outcome o = run([](Communicator& c, CudaDevice& device) {
    if (c.rank() == 1) throw Error("step 3: the loss is nan", ExitCode::OutOfMemory);
    Gather(c, device).read_in_order_of_compute(device);
  });
  EXPECT_EQ(o.thrown, "step 3: the loss is nan");
  EXPECT_EQ(o.texts[0], "all_gather of block 3 (forward): rank 1 left: step 3: the loss is nan");
  EXPECT_EQ(o.codes[0], ExitCode::OutOfMemory);
  EXPECT_EQ(o.failed_peer[0], 1);
  EXPECT_LT(o.seconds, 30);  // of 60
}

TEST_P(GpuFailure, of_a_rank_ends_a_wait_for_a_sum_as_well) {
  const Outcome o = run([](Communicator& c, CudaDevice& device) {
    if (c.rank() == 1) throw Error("step 3: the loss is nan");
    const Gather gather(c, device);
    device.wait(Stream::Compute, gather.arrival);
    const std::span<const float> arrays[] = {{gather.full.data<float>(), 2 * kShard}};
    sums_of_squares(device, arrays);
  });
  EXPECT_EQ(o.texts[0], "all_gather of block 3 (forward): rank 1 left: step 3: the loss is nan");
  EXPECT_EQ(o.failed_peer[0], 1);
}

TEST_P(GpuFailure, of_a_rank_that_ends_without_a_word_is_noticed_without_the_timeout) {
  const Outcome o = run([](Communicator& c, CudaDevice& device) {
    if (c.rank() == 0) Gather(c, device).read_in_order_of_compute(device);
  });
  EXPECT_EQ(o.codes[0], ExitCode::PeerVanished);
  EXPECT_TRUE(contains(o.thrown, "rank 1 is gone")) << o.thrown;
  EXPECT_LT(o.seconds, 30);  // of 60
}

TEST_P(GpuFailure, of_a_live_rank_to_come_is_noticed_by_the_timeout) {
  std::atomic<bool> over = false;
  SimOptions options;
  options.timeout = 300ms;
  const Outcome o = run(
      [&](Communicator& c, CudaDevice& device) {
        c.set_where("step 7");
        while (c.rank() == 1 && !over) {
          c.progress();
          cuda_emu::yield();
        }
        try {
          const Gather first(c, device);  // of two: the younger one does not make the wait look alive
          Gather(c, device).read_in_order_of_compute(device);
        } catch (...) {
          over = true;
          throw;
        }
      },
      options);
  EXPECT_EQ(o.codes[0], ExitCode::PeerVanished);
  EXPECT_TRUE(contains(o.texts[0],
                       "rank 0 is at step 7, in all_gather of block 3 (forward) [fp32 x 20]; rank 1 is at "
                       "step 7, in no collective"))
      << o.texts[0];
  EXPECT_EQ(o.failed_peer[1], 0);
}

TEST_P(GpuFailure, is_not_that_a_device_works_for_longer_than_the_timeout) {
  Event worked;
  std::atomic<bool> enqueued = false;
  SimOptions options;
  options.timeout = 50ms;
  std::chrono::steady_clock::duration took{};
  const Outcome o = run(
      [&](Communicator& c, CudaDevice& device) {
        const auto begun = std::chrono::steady_clock::now();
        const Buffer work(device.memory, std::int64_t{1} << 20, Tag::Workspace);
        if (c.rank() == 0) {
          for (int i = 0; i < 1500; ++i) device.zero(Stream::Compute, work.data(), work.bytes());
          worked = device.record(Stream::Compute);
          enqueued = true;
        }
        while (c.rank() == 1 && !(enqueued && worked.done())) {
          c.progress();  // it answers where it is
          cuda_emu::yield();
        }
        Gather(c, device).read_in_order_of_compute(device);
        if (c.rank() == 0) took = std::chrono::steady_clock::now() - begun;
      },
      options);
  EXPECT_EQ(o.thrown, "");
  EXPECT_GT(took, 2 * options.timeout);
}

INSTANTIATE_TEST_SUITE_P(Backends, GpuFailure, ::testing::Values("nccl", "staged"),
                         [](const auto& backend) { return std::string(backend.param); });

class NcclFailure : public GpuFailure {};
INSTANTIATE_TEST_SUITE_P(Backends, NcclFailure, ::testing::Values("nccl"));

TEST_P(NcclFailure, that_nccl_finds_is_thrown_in_its_words_when_no_rank_says_more) {
  machine.fail_collective(1, 1);
  const Outcome o =
      run([](Communicator& c, CudaDevice& device) { Gather(c, device).read_in_order_of_compute(device); });
  EXPECT_TRUE(contains(o.thrown, "all_gather of block 3 (forward): NCCL: remote process exited")) << o.thrown;
  EXPECT_EQ(o.codes[0], ExitCode::PeerVanished);
}

// A driver that takes no more launches would block a host, which could not notice anything any more.
TEST_P(NcclFailure, of_a_rank_to_come_holds_a_host_back_that_only_enqueues) {
  std::atomic<bool> over = false;
  int operations = 0;
  SimOptions options;
  options.timeout = 300ms;
  const Outcome o = run(
      [&](Communicator& c, CudaDevice& device) {
        while (c.rank() == 1 && !over) cuda_emu::yield();
        if (c.rank() == 1) c.barrier(kLabel);
        const Gather gather(c, device);
        device.wait(Stream::Compute, gather.arrival);
        try {
          for (; operations < 10'000; ++operations) c.progress();
        } catch (...) {
          over = true;
          throw;
        }
        over = true;
      },
      options);
  EXPECT_EQ(operations, 200);
  EXPECT_TRUE(contains(o.texts[0], "no progress for")) << o.texts[0];
}

// ---- refusals -------------------------------------------------------------------------------------------------------

TEST(Nccl, two_ranks_on_one_gpu_are_refused_before_nccl_is_called) {
  cuda_emu::Machine machine({.devices = 1});
  const Outcome o(3, [&](const Outcome::Note& note) {
    run_cuda_ranks(
        machine, 3, {}, make_nccl_transport,
        [&](Communicator& c, CudaDevice& device) { note(c.rank(), [&] { c.use_memory_of(device); }); },
        Gpus::OneForAll);
  });
  for (std::size_t r = 0; r < 3; ++r) {
    EXPECT_EQ(o.texts[r],
              "communication.backend: value 'nccl' needs a GPU for each rank, and ranks 0 and 1 use the same, "
              "GPU-00000000-0000-0000-0000-000000000000 (emulated GPU); communication.backend: staged lets ranks share "
              "GPUs");
    EXPECT_EQ(o.codes[r], ExitCode::Usage);
  }
  EXPECT_EQ(machine.communicators_made(), 0);
  EXPECT_EQ(machine.findings(), kNone);
}

TEST(GpuBackends, refuse_the_hosts_memory) {
  for (const MakeTransport& make : {MakeTransport(make_nccl_transport), MakeTransport(make_staged)}) {
    SimOptions options;
    options.over = make;
    const Outcome o(1, [&](const Outcome::Note& note) {
      run_ranks(1, options, [&](Communicator& c) {
        CpuDevice device;
        note(0, [&] { c.use_memory_of(device); });
      });
    });
    EXPECT_EQ(o.codes[0], ExitCode::Usage);
    EXPECT_TRUE(contains(o.texts[0], "communication.backend: value '")) << o.texts[0];
    EXPECT_TRUE(contains(o.texts[0], "device is cpu; allowed: mpi, sim")) << o.texts[0];
  }
}

}  // namespace
}  // namespace regather::conformance
