#include "dist/shard_unit.h"

#include "tests/dist/toy_units.h"
#include "tests/message_of.h"

namespace regather {
namespace {

using namespace toy;
using std::chrono::microseconds;

std::int64_t gathers(const Communicator& comm) {
  std::int64_t n = 0;
  for (const auto& [key, counts] : comm.ledger().entries())
    n += key.collective == Collective::AllGather ? counts.count : 0;
  return n;
}

// ---- states and leases ----------------------------------------------------------------------------------------------

TEST(ShardUnit, GathersOnceUntilItIsEvictedAndWaitsAtTheFirstRead) {
  on_ranks(2, [](Communicator& comm) {
    CpuDevice device;
    Trace trace;
    trace.keep_lines = true;
    device.trace = &trace;
    ShardUnit unit(odd_unit(), "block", device, comm, {});
    using Lines = std::vector<std::string>;
    EXPECT_FALSE(unit.resident());
    unit.prefetch(Pass::Forward);
    EXPECT_TRUE(unit.resident());
    unit.prefetch(Pass::Forward);
    {
      const auto lease = unit.acquire(Pass::Forward), another = unit.acquire(Pass::Forward);
      EXPECT_EQ(trace.lines, Lines{"gather block 3"}) << "nobody has read a parameter";
      unit.data(0);
      unit.data(2);
      EXPECT_EQ(trace.lines, (Lines{"gather block 3", "wait block 3"}));
    }
    { const auto lease = unit.acquire(Pass::Backward); }
    EXPECT_EQ(gathers(comm), 1);
    unit.evict();
    EXPECT_FALSE(unit.resident());
    const auto lease = unit.acquire(Pass::Backward);
    unit.data(0);
    EXPECT_EQ(trace.lines, (Lines{"gather block 3", "wait block 3", "gather block 3", "wait block 3"}));
    const auto& entries = comm.ledger().entries();
    ASSERT_EQ(entries.size(), 2U) << "the pass is the one that was stated";
    EXPECT_EQ(entries.at({Collective::AllGather, "block", Pass::Forward, DType::F32}).count, 1);
    EXPECT_EQ(entries.at({Collective::AllGather, "block", Pass::Backward, DType::F32}).count, 1);
  });
}

TEST(ShardUnit, IsNotEvictedWhileItIsLeased) {
  on_ranks(2, [](Communicator& comm) {
    CpuDevice device;
    for (const Strategy strategy : kStrategies) {
      ShardUnit unit(odd_unit(), "block", device, comm, {.strategy = strategy});
      {
        auto lease = unit.acquire(Pass::Forward);
        const auto moved = std::move(lease);  // one lease still, whoever holds it
        const auto second = unit.acquire(Pass::Forward);
        const std::string refusal =
            strategy == Strategy::Full ? "block 3: evicted while leased" : "block 3: parameters changed while leased";
        if (strategy == Strategy::Full) {
          EXPECT_EQ(message_of([&] { unit.evict(); }), refusal);
        }
        EXPECT_EQ(message_of([&] { unit.parameters_changed(); }), refusal);
        EXPECT_EQ(read(unit, 0), start_values(unit.table()[0], 1)) << "a refusal changes nothing";
      }
      EXPECT_EQ(message_of([&] { unit.parameters_changed(); }), "nothing thrown");
      unit.finish_refresh();
    }
  });
}

TEST(ShardUnit, ParametersAreReadUnderALeaseOnly) {
  on_ranks(2, [](Communicator& comm) {
    CpuDevice device;
    for (const Strategy strategy : kStrategies) {
      ShardUnit unit(odd_unit(), "block", device, comm, {.strategy = strategy});
      const std::string refusal = "block 3: a parameter is read without a lease";
      EXPECT_EQ(message_of([&] { unit.data(0); }), refusal);
      unit.prefetch(Pass::Forward);
      EXPECT_EQ(message_of([&] { unit.data(0); }), refusal) << "on its way is not leased";
      { const auto lease = unit.acquire(Pass::Forward); }
      EXPECT_EQ(message_of([&] { unit.data(0); }), refusal) << "that lease is over";
      const auto lease = unit.acquire(Pass::Forward);
      EXPECT_EQ(message_of([&] { unit.data(0); }), "nothing thrown");
    }
  });
}

TEST(ShardUnit, AnExceptionEndsItsLeases) {
  on_ranks(2, [](Communicator& comm) {
    CpuDevice device;
    ShardUnit unit(odd_unit(), "block", device, comm, {});
    EXPECT_EQ(message_of([&] {
                const auto lease = unit.acquire(Pass::Forward);
                throw Error("an operation failed");
              }),
              "an operation failed");
    EXPECT_EQ(message_of([&] { unit.evict(); }), "nothing thrown");
  });
}

TEST(ShardUnit, EvictionFreesTheWholeCopy) {
  for (int world = 1; world <= 4; ++world)
    on_ranks(world, [&](Communicator& comm) {
      CpuDevice device;
      ShardUnit unit(odd_unit(), "block", device, comm, {});
      const std::int64_t full = 4 * world * (ceil_div(kTrainable, world) + ceil_div(kFrozen, world));
      for (int i = 0; i < 3; ++i) {
        {
          const auto lease = unit.acquire(Pass::Forward);
          unit.data(0);
          EXPECT_EQ(device.memory.live(Tag::Gathered), full);
        }
        unit.evict();
        EXPECT_EQ(device.memory.live(Tag::Gathered), 0);
      }
      EXPECT_EQ(device.memory.peak(Tag::Gathered), full);
    });
}

// What is used again leaves its vectors behind: they are read without a wait, and the first matrix waits for the
// gather.
TEST(ShardUnit, VectorsStayWhenItIsUsedAgain) {
  on_ranks(2, [](Communicator& comm) {
    CpuDevice device;
    Trace trace;
    trace.keep_lines = true;
    device.trace = &trace;
    ShardUnit unit(odd_unit(), "block", device, comm, {});
    const auto read_all = [&](bool vectors) {
      for (int i = 0; i < static_cast<int>(unit.table().size()); ++i) {
        const ParamInfo& p = unit.table()[static_cast<std::size_t>(i)];
        if ((p.shape.ndim() == 1) == vectors) {
          EXPECT_EQ(read(unit, i), start_values(p, 1));
        }
      }
    };
    std::int64_t vectors = 0;
    for (const ParamInfo& p : unit.table()) vectors += p.shape.ndim() == 1 ? 4 * p.shape.numel() : 0;
    EXPECT_GT(vectors, 0);
    using Lines = std::vector<std::string>;
    const Lines gathered{"gather block 3"}, waited{"gather block 3", "wait block 3"};
    for (const bool again : {true, true, false}) {
      const bool left_behind = device.memory.live(Tag::Gathered) > 0;
      trace.lines.clear();
      {
        const auto lease = unit.acquire(Pass::Backward);
        read_all(true);
        EXPECT_EQ(trace.lines, left_behind ? gathered : waited);
        read_all(false);
        EXPECT_EQ(trace.lines, waited);
      }
      unit.evict(again ? ShardUnit::Then::UsedAgain : ShardUnit::Then::Done);
      EXPECT_EQ(device.memory.live(Tag::Gathered), again ? vectors : 0);
    }
    EXPECT_EQ(gathers(comm), 3);
  });
}

TEST(ShardUnit, EvictionWhileTheGatherFliesIsSafe) {
  for (const int world : {2, 3})
    on_ranks(
        world,
        [](Communicator& comm) {
          CpuDevice device;
          ShardUnit unit(odd_unit(), "block", device, comm, {});
          for (int i = 0; i < 4; ++i) {
            unit.prefetch(Pass::Forward);
            unit.evict();
            EXPECT_FALSE(unit.resident());
          }
          {
            const auto lease = unit.acquire(Pass::Forward);
            for (int p = 0; p < 6; ++p)
              EXPECT_EQ(read(unit, p), start_values(unit.table()[static_cast<std::size_t>(p)], 1));
          }
          EXPECT_EQ(gathers(comm), 5);
          unit.evict();
          unit.prefetch(Pass::Forward);  // by now the abandoned gathers have ended, and their room is free
          const std::int64_t full =
              4 * comm.size() * (ceil_div(kTrainable, comm.size()) + ceil_div(kFrozen, comm.size()));
          EXPECT_EQ(device.memory.live(Tag::Gathered), full);
          const auto lease = unit.acquire(Pass::Forward);
          unit.data(0);
        },
        microseconds(2000));
}

TEST(ShardUnit, CopiesAreStaleOnceParametersHaveChanged) {
  for (const Strategy strategy : kStrategies)
    for (const int world : {1, 2, 3})
      on_ranks(
          world,
          [&](Communicator& comm) {
            CpuDevice device;
            ShardUnit unit(odd_unit(), "block", device, comm, {.strategy = strategy});
            const std::vector<ParamInfo> table = unit.table();
            for (int update = 1; update <= 3; ++update) {
              {
                const auto lease = unit.acquire(Pass::Forward);
                unit.data(0);
              }
              unit.begin_step();
              for (const ShardUnit::OwnedPiece& piece : unit.updated())
                for (std::int64_t i = 0; i < piece.size; ++i) piece.value[i] += 1;  // of its own elements, each rank
              unit.parameters_changed();
              unit.finish_refresh();
              const auto lease = unit.acquire(Pass::Forward);
              for (int p = 0; p < 6; ++p) {
                Floats expected = start_values(table[static_cast<std::size_t>(p)], 1);
                for (int k = 0; k < update && table[static_cast<std::size_t>(p)].trainable; ++k)
                  for (float& v : expected) v += 1;
                EXPECT_EQ(read(unit, p), expected) << name_of(strategy) << ", parameter " << p << ", update " << update;
              }
            }
          },
          microseconds(300));
}

TEST(ShardUnit, AReadWaitsForTheRefreshByItself) {  // without finish_refresh
  on_ranks(
      3,
      [](Communicator& comm) {
        CpuDevice device;
        ShardUnit unit(odd_unit(), "block", device, comm, {.strategy = Strategy::Optimizer});
        for (const ShardUnit::OwnedPiece& piece : unit.updated())
          for (std::int64_t i = 0; i < piece.size; ++i) piece.value[i] = 5;
        unit.parameters_changed();
        const auto lease = unit.acquire(Pass::Forward);
        EXPECT_EQ(read(unit, 0), Floats(15, 5.0F));
      },
      microseconds(2000));
}

TEST(ShardUnit, EvictionLeavesAReplicaAndItsRefreshAlone) {
  for (const Strategy strategy : {Strategy::Gradients, Strategy::Optimizer, Strategy::None})
    on_ranks(
        2,
        [&](Communicator& comm) {
          CpuDevice device;
          ShardUnit unit(odd_unit(), "block", device, comm, {.strategy = strategy});
          for (const ShardUnit::OwnedPiece& piece : unit.updated())
            for (std::int64_t i = 0; i < piece.size; ++i) piece.value[i] = 5;
          unit.parameters_changed();
          unit.evict();
          EXPECT_TRUE(unit.resident());
          const auto lease = unit.acquire(Pass::Forward);
          EXPECT_EQ(read(unit, 0), Floats(15, 5.0F)) << name_of(strategy);
        },
        microseconds(2000));
}

// ---- values ---------------------------------------------------------------------------------------------------------

TEST(ShardUnit, StartValuesDoNotDependOnRanksOrStrategy) {
  for (const UnitSpec& spec : {odd_unit(), tiny_unit(), frozen_unit()})
    for (const std::uint64_t seed : {1U, 2U})
      for (int world = 1; world <= 4; ++world)
        for (const Strategy strategy : kStrategies)
          on_ranks(world, [&](Communicator& comm) {
            CpuDevice device;
            ShardUnit unit(spec, "block", device, comm, {.strategy = strategy, .seed = seed});
            const auto lease = unit.acquire(Pass::Forward);
            for (int p = 0; p < static_cast<int>(spec.params.size()); ++p)
              EXPECT_EQ(read(unit, p), start_values(spec.params[static_cast<std::size_t>(p)], seed))
                  << spec.name << ' ' << world << ' ' << name_of(strategy);
          });
  EXPECT_NE(start_values(odd_unit().params[0], 1), start_values(odd_unit().params[0], 2));
  EXPECT_NE(start_values(odd_unit("block 1").params[0], 1), start_values(odd_unit("block 2").params[0], 1));
}

TEST(ShardUnit, OneGatherIsOneEntryThoughItSendsTwoBuffers) {
  for (int world = 1; world <= 4; ++world)
    on_ranks(world, [&](Communicator& comm) {
      CpuDevice device;
      ShardUnit unit(odd_unit(), "block", device, comm, {});
      const auto lease = unit.acquire(Pass::Forward);
      unit.data(0);
      const std::int64_t shard = ceil_div(kTrainable, world) + ceil_div(kFrozen, world);
      const auto& entries = comm.ledger().entries();
      ASSERT_EQ(entries.size(), 1U);
      const LedgerCounts& counts = entries.at({Collective::AllGather, "block", Pass::Forward, DType::F32});
      EXPECT_EQ(counts.count, 1);
      EXPECT_EQ(counts.logical_bytes, 4 * world * shard);
      EXPECT_EQ(counts.wire_bytes, 4 * (world - 1) * shard);
    });
}

TEST(ShardUnit, EachStrategyHoldsExactlyItsShare) {
  for (int world = 1; world <= 4; ++world)
    for (const Strategy strategy : kStrategies)
      on_ranks(world, [&](Communicator& comm) {
        CpuDevice device;
        const ShardUnit unit(odd_unit(), "block", device, comm, {.strategy = strategy, .reductions_per_step = 2});
        const std::int64_t shard = ceil_div(kTrainable, world), frozen = ceil_div(kFrozen, world);
        const std::int64_t parts = strategy == Strategy::Full ? 1 : world;
        EXPECT_EQ(device.memory.live(Tag::Parameters), 4 * parts * (shard + frozen));
        EXPECT_EQ(device.memory.live(Tag::Gradients), 4 * shard * (strategy == Strategy::None ? world : 1))
            << "none of frozen ones";
        EXPECT_EQ(unit.state_elements(), shard * (strategy == Strategy::None ? world : 1));
        EXPECT_EQ(device.memory.live(Tag::Gathered), 0);
      });
}

TEST(ShardUnit, AMetaRunAllocatesAndCountsTheSame) {
  for (const Strategy strategy : kStrategies) {
    std::vector<Allocator::Event> events[2];
    Ledger::Entries entries[2];
    const auto body = [&](Communicator& comm, Allocator::Mode mode) {
      const std::size_t which = mode == Allocator::Mode::Meta;
      CpuDevice device(mode);
      std::vector<Allocator::Event> log;
      device.memory.log = &log;
      {
        ShardUnit unit(odd_unit(), "block", device, comm, {.strategy = strategy});
        unit.begin_step();
        {
          const auto lease = unit.acquire(Pass::Forward);
          unit.data(0);
        }
        unit.gradients(Tag::Workspace).data(0);
        unit.reduce();
        unit.finish_reduction();
        unit.parameters_changed();
        unit.finish_refresh();
      }
      device.memory.log = nullptr;
      if (comm.rank() == 0) events[which] = log, entries[which] = comm.ledger().entries();
    };
    on_ranks(2, [&](Communicator& comm) { body(comm, Allocator::Mode::Real); });
    body(*make_dry_communicator(0, 2), Allocator::Mode::Meta);
    EXPECT_EQ(events[0], events[1]) << name_of(strategy);
    EXPECT_TRUE(differences(entries[0], entries[1]).empty()) << name_of(strategy);
  }
}

}  // namespace
}  // namespace regather
