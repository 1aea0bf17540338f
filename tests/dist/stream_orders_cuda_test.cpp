// What units wait for on GPUs: gathers before reads, readers before memory is used again, gradients before they are
// reduced, and reductions before their sums are read. Every strategy, alone, with NCCL and with ranks that share a GPU,
// under many orders of the streams: the bits of the same program on a CPU. tests/stream_mutants.py takes each wait out.
#include <gtest/gtest.h>

#include "dist/optimizer.h"
#include "tests/cuda_emu/seeds.h"
#include "tests/dist/cuda_ranks.h"
#include "tests/dist/toy_units.h"
#include "tests/tensor/cuda/on_device.h"

namespace regather::testing {
namespace {

using toy::Floats;

enum class Moved { Alone, Nccl, Staged };
constexpr std::int64_t kRoom = 64 << 10;  // bytes of what a rank has read

// One rank's units in steps like those of training. What it reads is copied in the order of compute, and fetched by the
// host only in the end, so that little waits for the host.
class Steps {
 public:
  Steps(Communicator& comm, Device& device, Strategy strategy, DType compute)
      : comm_(comm),
        device_(device),
        read_(device.memory, kRoom, Tag::Workspace),
        a_(toy::odd_unit("a"), "block", device, comm, {strategy, 1, 2, compute}),
        b_(toy::odd_unit("b"), "block", device, comm, {strategy, 1, 2, compute}) {
    device_.zero(Stream::Compute, read_.data(), read_.bytes());
  }

  Floats run() {
    for (int step = 0; step < 2; ++step) {
      if (step == 1) abandoned_step();
      a_.begin_step();
      b_.begin_step();
      first_micro_batch(2 * step);
      second_micro_batch(2 * step + 1);
      a_.finish_reduction();
      b_.finish_reduction();
      for (ShardUnit* unit : {&a_, &b_}) update(*unit);
      std::vector<double> sums = {1.0, static_cast<double>(comm_.rank())};
      comm_.all_reduce(sums, {.unit = "scalars", .pass = Pass::Step});
      EXPECT_EQ(sums, (std::vector<double>{1.0 * comm_.size(), comm_.size() == 2 ? 1.0 : 0.0}));
      for (ShardUnit* unit : {&a_, &b_}) unit->parameters_changed();
      for (ShardUnit* unit : {&a_, &b_}) unit->finish_refresh();
      read(a_);
      for (ShardUnit* unit : {&a_, &b_}) {
        const Buffer all = unit->whole_values(ShardUnit::Part::Trainable, Pass::Save);
        keep(all.data(), toy::kTrainable * 4);
      }
    }
    for (ShardUnit* unit : {&a_, &b_}) unit->evict();
    Floats values(kRoom / 4);
    device_.read(Stream::Compute, values.data(), read_.data(), kRoom);
    return values;
  }

 private:
  // With reductions and a gather in flight. Whoever gets memory next writes to it.
  void abandoned_step() {
    a_.begin_step();
    b_.begin_step();
    backward(b_, 4);
    backward(a_, 5);
    b_.evict();
    b_.prefetch(Pass::Backward);
    b_.evict();
    a_.evict();
    a_.abandon_step();
    b_.abandon_step();
    for (const std::int64_t bytes : {toy::kTrainable * 4, toy::kTrainable * 2, toy::kFrozen * 4, toy::kFrozen * 2}) {
      const Buffer other(device_.memory, bytes, Tag::Workspace);
      device_.zero(Stream::Compute, other.data(), other.bytes());
    }
  }
  void first_micro_batch(int k) {
    a_.prefetch(Pass::Forward);
    b_.prefetch(Pass::Forward);
    read(a_);
    a_.evict(ShardUnit::Then::UsedAgain);
    read(b_);
    b_.evict();
    b_.prefetch(Pass::Backward);
    b_.evict();  // in flight, and read by nobody
    backward(b_, k);
    a_.prefetch(Pass::Backward);
    backward(a_, k);
    a_.evict();
    b_.evict();
  }
  void second_micro_batch(int k) {
    a_.prefetch(Pass::Forward);
    a_.evict(ShardUnit::Then::UsedAgain);  // its vectors are taken out of what is still in flight
    a_.prefetch(Pass::Backward);
    backward(a_, k);
    backward(b_, k);
    a_.evict();
    b_.evict();
  }
  void backward(ShardUnit& unit, int k) {
    const auto lease = unit.acquire(Pass::Backward);
    read(unit);
    UnitGradients& gradients = unit.gradients(Tag::Workspace);
    for (int p = 0; p < static_cast<int>(unit.table().size()); ++p)
      if (float* g = gradients.data(p)) {
        Floats part(static_cast<std::size_t>(unit.table()[static_cast<std::size_t>(p)].shape.numel()));
        for (std::size_t i = 0; i < part.size(); ++i)
          part[i] = toy::contribution(comm_.rank(), p, static_cast<std::int64_t>(i), k);
        const Buffer there = on_device(device_, part);
        device_.add(Stream::Compute, g, g, there.data<float>(), static_cast<std::int64_t>(part.size()));
      }
    unit.reduce();
  }
  void update(ShardUnit& unit) {
    for (const ShardUnit::OwnedPiece& piece : unit.updated()) {
      device_.add(Stream::Compute, piece.value, piece.value, piece.gradient, piece.size);
      keep(piece.gradient, piece.size * 4);
    }
  }
  void read(ShardUnit& unit) {
    const auto lease = unit.acquire(Pass::Forward);
    for (int p = static_cast<int>(unit.table().size()); p-- > 0;)
      keep(unit.data(p),
           unit.table()[static_cast<std::size_t>(p)].shape.numel() * static_cast<std::int64_t>(size_of(unit.dtype())));
  }
  void keep(const void* data, std::int64_t bytes) {
    device_.copy(Stream::Compute, read_.data<char>() + kept_, data, bytes);
    kept_ += (bytes + 15) / 16 * 16;
    ASSERT_LE(kept_, kRoom);
  }

  Communicator& comm_;
  Device& device_;
  Buffer read_;
  std::int64_t kept_ = 0;
  ShardUnit a_, b_;
};

using OfRanks = std::vector<Floats>;

OfRanks on_cpus(int ranks, Strategy strategy, DType compute) {
  OfRanks values(static_cast<std::size_t>(ranks));
  run_ranks(ranks, {}, [&](Communicator& comm) {
    CpuDevice device;
    values[static_cast<std::size_t>(comm.rank())] = Steps(comm, device, strategy, compute).run();
  });
  return values;
}

void run_on_gpus(cuda_emu::Machine& machine, Moved moved, const std::function<void(Communicator&, CudaDevice&)>& body) {
  const auto make = [&](std::unique_ptr<Transport> messages, int rank, int size) {
    return moved == Moved::Nccl ? make_nccl_transport(std::move(messages), rank, size)
                                : make_staged_transport(std::move(messages), rank, size, 32);
  };
  run_cuda_ranks(machine, 2, {}, make, body, moved == Moved::Nccl ? Gpus::OneEach : Gpus::OneForAll);
}

OfRanks on_gpus(Moved moved, std::uint64_t seed, Strategy strategy, DType compute) {
  const int ranks = moved == Moved::Alone ? 1 : 2, devices = moved == Moved::Nccl ? 2 : 1;
  cuda_emu::Machine machine(
      {.seed = seed, .devices = devices, .blocks_apart = 0, .guarded = false, .late_collectives = true});
  OfRanks values(static_cast<std::size_t>(ranks));
  if (moved == Moved::Alone) {
    CudaDevice device(0, 0, 4096);
    const auto comm = make_single_communicator({});
    comm->use_memory_of(device);
    values[0] = Steps(*comm, device, strategy, compute).run();
  } else {
    run_on_gpus(machine, moved, [&](Communicator& comm, CudaDevice& device) {
      comm.use_memory_of(device);
      values[static_cast<std::size_t>(comm.rank())] = Steps(comm, device, strategy, compute).run();
    });
  }
  EXPECT_EQ(machine.findings(), std::vector<std::string>{});
  for (int d = 0; d < devices; ++d) EXPECT_EQ(machine.used_bytes(d), 0U);
  return values;
}

void expect_the_cpus_bits(Moved moved) {
  const auto same = [](const OfRanks& a, const OfRanks& b) {
    for (std::size_t r = 0; r < a.size(); ++r)
      if (std::memcmp(a[r].data(), b[r].data(), kRoom) != 0) return false;
    return a.size() == b.size();
  };
  for (const Strategy strategy : toy::kStrategies)
    for (const DType compute : {DType::F32, DType::BF16}) {
      const OfRanks expected = on_cpus(moved == Moved::Alone ? 1 : 2, strategy, compute);
      for (std::uint64_t seed = 0;
           seed < static_cast<std::uint64_t>(cuda_emu::testing::seeds(cuda_emu::testing::kSeesRaces ? 1 : 8)); ++seed)
        ASSERT_TRUE(same(on_gpus(moved, seed, strategy, compute), expected) && !::testing::Test::HasFailure())
            << toy::name_of(strategy) << " in " << name_of(compute) << ", seed " << seed;
    }
}

TEST(StreamOrders, of_units_on_one_gpu) { expect_the_cpus_bits(Moved::Alone); }
TEST(StreamOrders, of_units_on_a_gpu_each) { expect_the_cpus_bits(Moved::Nccl); }
TEST(StreamOrders, of_units_that_share_a_gpu) { expect_the_cpus_bits(Moved::Staged); }

TEST(StreamOrders, of_a_gather_that_does_not_begin) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    cuda_emu::Machine machine({.seed = seed, .devices = 1, .blocks_apart = 0, .guarded = false});
    {
      CudaDevice device(0);
      const auto comm = make_single_communicator({});
      ShardUnit unit(toy::odd_unit(), "block", device, *comm, {});
      comm->leave("it is over", ExitCode::Failed);
      EXPECT_THROW(unit.prefetch(Pass::Forward), Error);
    }
    EXPECT_EQ(machine.findings(), std::vector<std::string>{});
  }
}

// What was enqueued for it may still write to memory that somebody else has by now.
TEST(StreamOrders, of_a_unit_that_ends_with_collectives_in_flight) {
  for (const Moved moved : {Moved::Nccl, Moved::Staged})
    for (std::uint64_t seed = 0; seed < 8; ++seed) {
      const int devices = moved == Moved::Nccl ? 2 : 1;
      cuda_emu::Machine machine(
          {.seed = seed, .devices = devices, .blocks_apart = 0, .guarded = false, .late_collectives = true});
      const auto body = [&](Communicator& comm, CudaDevice& device) {
        comm.use_memory_of(device);
        {
          ShardUnit unit(toy::odd_unit(), "block", device, comm, {});
          unit.begin_step();
          UnitGradients& gradients = unit.gradients(Tag::Workspace);
          const Floats ones(toy::kTrainable, 1.0F);
          device.write(Stream::Compute, gradients.data(0), ones.data(), toy::kTrainable * 4);
          unit.reduce();
          unit.prefetch(Pass::Backward);
        }
        std::vector<Buffer> others;
        for (const std::int64_t elements : {toy::kTrainable, toy::kTrainable, toy::kTrainable / 2, toy::kTrainable / 2,
                                            toy::kFrozen + 1, (toy::kFrozen + 1) / 2}) {
          others.emplace_back(device.memory, elements * 4, Tag::Workspace);
          device.zero(Stream::Compute, others.back().data(), others.back().bytes());
        }
        for (const Stream stream : {Stream::Gather, Stream::Reduce}) device.record(stream).wait();
        for (const Buffer& other : others) {
          Floats values(static_cast<std::size_t>(other.bytes() / 4));
          device.read(Stream::Compute, values.data(), other.data(), other.bytes());
          EXPECT_EQ(values, Floats(values.size(), 0.0F)) << "seed " << seed;
        }
        EXPECT_THROW(comm.barrier({"end", Pass::Step}), Error);
      };
      run_on_gpus(machine, moved, body);
      EXPECT_EQ(machine.findings(), std::vector<std::string>{});
      ASSERT_FALSE(::testing::Test::HasFailure()) << "seed " << seed;
    }
}

TEST(StreamOrders, of_the_state_of_an_optimizer) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    const cuda_emu::Machine machine({.seed = seed, .devices = 1, .blocks_apart = 0, .guarded = false});
    CudaDevice device(0);
    const auto comm = make_single_communicator({});
    std::vector<std::unique_ptr<ShardUnit>> units;
    units.push_back(std::make_unique<ShardUnit>(toy::odd_unit(), "block", device, *comm, UnitOptions{}));
    ShardedOptimizer optimizer(units, device, {});
    units[0]->begin_step();
    optimizer.step(1e-2, 1, 1);
    for (const ShardUnit::OwnedPiece& piece : units[0]->updated()) {
      Floats values(static_cast<std::size_t>(piece.size));
      device.read(Stream::Compute, values.data(), piece.value, piece.size * 4);
      for (const float v : values) ASSERT_TRUE(std::isfinite(v)) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace regather::testing
