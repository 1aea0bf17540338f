#include "dist/shard_unit.h"

#include <algorithm>
#include <optional>

#include "tensor/ops/kernels.h"
#include "tests/dist/toy_units.h"

namespace regather {
namespace {

using namespace toy;
using std::chrono::microseconds;

template <class F>
std::string message_of(F f) {
  try {
    f();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "nothing thrown";
}

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

// ---- gradients ------------------------------------------------------------------------------------------------------

// What reductions must give for the k-th .. contributions: sums in rank order, added up one reduction after the other.
std::map<std::string, Floats> expected_sums(const UnitSpec& spec, int world, int reductions) {
  std::map<std::string, Floats> expected;
  for (int p = 0; p < static_cast<int>(spec.params.size()); ++p) {
    const ParamInfo& info = spec.params[static_cast<std::size_t>(p)];
    if (!info.trainable) continue;
    for (std::int64_t i = 0; i < info.shape.numel(); ++i) {
      float total = 0;
      for (int k = 0; k < reductions; ++k) {
        float sum = contribution(0, p, i, k);
        for (int rank = 1; rank < world; ++rank) sum += contribution(rank, p, i, k);
        total += sum;
      }
      expected[info.name].push_back(total);
    }
  }
  return expected;
}

TEST(ShardUnit, EveryStrategyReducesToTheSameSumsInRankOrder) {
  for (const UnitSpec& spec : {odd_unit(), tiny_unit()})
    for (int world = 1; world <= 4; ++world)
      for (int reductions = 1; reductions <= 3; ++reductions)
        for (const Strategy strategy : kStrategies) {
          Whole whole;
          on_ranks(world, [&](Communicator& comm) {
            CpuDevice device;
            ShardUnit unit(spec, "block", device, comm, {.strategy = strategy, .reductions_per_step = reductions});
            for (int step = 0; step < 2; ++step) {  // the second one begins with zeros again
              unit.begin_step();
              for (int k = 0; k < reductions; ++k) {
                contribute(unit, comm.rank(), Tag::Workspace, k);
                unit.reduce();
                unit.finish_reduction();
              }
            }
            whole.add(unit, unit.normed(), &ShardUnit::OwnedPiece::gradient);
          });
          EXPECT_EQ(whole.values(), expected_sums(spec, world, reductions))
              << spec.name << ", " << world << " ranks, " << name_of(strategy);
        }
}

TEST(ShardUnit, DataParallelRanksAllHoldTheWholeSum) {
  on_ranks(3, [&](Communicator& comm) {
    CpuDevice device;
    ShardUnit unit(odd_unit(), "block", device, comm, {.strategy = Strategy::None});
    unit.begin_step();
    contribute(unit, comm.rank(), Tag::Workspace);
    unit.reduce();
    unit.finish_reduction();
    Whole whole;  // of this rank alone
    whole.add(unit, unit.updated(), &ShardUnit::OwnedPiece::gradient);
    EXPECT_EQ(whole.values(), expected_sums(odd_unit(), 3, 1));
  });
}

TEST(ShardUnit, BackwardsAddUpUntilTheReduction) {
  for (const Strategy strategy : kStrategies) {
    Whole whole;
    on_ranks(2, [&](Communicator& comm) {
      CpuDevice device;
      ShardUnit unit(odd_unit(), "block", device, comm, {.strategy = strategy});
      unit.begin_step();
      contribute(unit, comm.rank(), Tag::Gradients, 0);
      contribute(unit, comm.rank(), Tag::Gradients, 1);
      unit.reduce();
      unit.finish_reduction();
      whole.add(unit, unit.normed(), &ShardUnit::OwnedPiece::gradient);
    });
    const Floats& weight = whole.values().at("block 3.weight");
    for (std::int64_t i = 0; i < 15; ++i)
      EXPECT_EQ(weight[static_cast<std::size_t>(i)], (contribution(0, 0, i, 0) + contribution(0, 0, i, 1)) +
                                                         (contribution(1, 0, i, 0) + contribution(1, 0, i, 1)));
  }
}

// What is written while a reduction flies belongs to the next one, whatever the strategy does with its buffers.
TEST(ShardUnit, ContributionsMadeWhileAReductionFliesAreNotLost) {
  for (const Strategy strategy : kStrategies) {
    Whole whole;
    on_ranks(
        2,
        [&](Communicator& comm) {
          CpuDevice device;
          ShardUnit unit(odd_unit(), "block", device, comm, {.strategy = strategy, .reductions_per_step = 3});
          unit.begin_step();
          for (int k = 0; k < 3; ++k) {
            contribute(unit, comm.rank(), Tag::Workspace, k);
            unit.reduce();
          }
          unit.finish_reduction();
          whole.add(unit, unit.normed(), &ShardUnit::OwnedPiece::gradient);
        },
        microseconds(1000));
    EXPECT_EQ(whole.values(), expected_sums(odd_unit(), 2, 3)) << name_of(strategy);
  }
}

// Whoever gets the memory that was given back writes to it.
std::vector<Buffer> written_over(CpuDevice& device) {
  std::vector<Buffer> buffers;
  for (int i = 0; i < 4; ++i) {
    buffers.emplace_back(device.memory, 4 * kTrainable, Tag::Workspace);
    std::fill_n(buffers.back().data<float>(), kTrainable, NAN);
  }
  return buffers;
}

TEST(ShardUnit, NothingOfAnAbandonedStepReachesTheNextOne) {
  for (const Strategy strategy : kStrategies)
    for (const int reductions : {1, 2}) {
      Whole whole;
      on_ranks(
          2,
          [&](Communicator& comm) {
            CpuDevice device;
            ShardUnit unit(odd_unit(), "block", device, comm,
                           {.strategy = strategy, .reductions_per_step = reductions});
            unit.begin_step();
            contribute(unit, comm.rank(), Tag::Workspace, 1);
            unit.prefetch(Pass::Backward);
            unit.reduce();
            unit.evict();
            unit.abandon_step();
            written_over(device);
            unit.begin_step();
            EXPECT_EQ(device.memory.live(Tag::Workspace) + device.memory.live(Tag::Gathered), 0);
            for (int p = 0; p < 6; ++p) EXPECT_FALSE(unit.written(p));
            contribute(unit, comm.rank(), Tag::Workspace, 0);
            unit.reduce();
            unit.finish_reduction();
            whole.add(unit, unit.normed(), &ShardUnit::OwnedPiece::gradient);
          },
          microseconds(3000));
      EXPECT_EQ(whole.values(), expected_sums(odd_unit(), 2, 1)) << name_of(strategy) << ", " << reductions;
    }
}

// It cannot wait; so nobody is told later that the collective has ended.
TEST(ShardUnit, EndsItsCommunicatorWhenItIsDestroyedWithACollectiveInFlight) {
  enum class InFlight { Nothing, Gather, EvictedGather, Refresh, Reduction };
  using enum InFlight;
  for (const InFlight what : {Nothing, Gather, EvictedGather, Refresh, Reduction})
    on_ranks(
        2,
        [&](Communicator& comm) {
          CpuDevice device;
          {
            const auto strategy = what == Refresh ? Strategy::Gradients : Strategy::Full;
            ShardUnit unit(odd_unit(), "block", device, comm, {.strategy = strategy});
            unit.begin_step();
            contribute(unit, comm.rank(), Tag::Workspace);
            if (what == Refresh) unit.parameters_changed();
            if (what == Reduction) unit.reduce();
            if (what == Nothing || what == Gather || what == EvictedGather) unit.prefetch(Pass::Backward);
            if (what == Nothing || what == EvictedGather) unit.evict();
            if (what == Nothing) unit.finish_gathers();
          }
          written_over(device);
          const std::string text = message_of([&] { comm.barrier({"end", Pass::Step}); });
          EXPECT_EQ(text.find("block 3") != std::string::npos, what != Nothing) << text;
          EXPECT_EQ(text.find("its memory was given back before its end") != std::string::npos, what != Nothing)
              << text;
        },
        microseconds(3000));
}

TEST(ShardUnit, AFullGradientLivesUntilItsReductionOnly) {
  for (const Tag lifetime : {Tag::Workspace, Tag::Gradients})
    on_ranks(2, [&](Communicator& comm) {
      CpuDevice device;
      ShardUnit unit(odd_unit(), "block", device, comm, {});
      const std::int64_t shard = 4 * kTrainable / 2, full = 4 * kTrainable;
      unit.begin_step();
      EXPECT_EQ(device.memory.live(Tag::Gradients), shard);
      contribute(unit, comm.rank(), lifetime);
      EXPECT_EQ(device.memory.live(lifetime), full + (lifetime == Tag::Gradients ? shard : 0));
      unit.reduce();
      unit.finish_reduction();
      EXPECT_EQ(device.memory.live(Tag::Workspace), 0);
      EXPECT_EQ(device.memory.live(Tag::Gradients), shard);
    });
}

TEST(ShardUnit, FrozenParametersHaveNoGradientAndNoReduction) {
  on_ranks(2, [](Communicator& comm) {
    CpuDevice device;
    ShardUnit unit(odd_unit(), "block", device, comm, {}), frozen(frozen_unit(), "block", device, comm, {});
    unit.begin_step();
    UnitGradients& gradients = unit.gradients(Tag::Workspace);
    EXPECT_EQ(gradients.data(1), nullptr);
    EXPECT_EQ(gradients.data(4), nullptr);
    EXPECT_EQ(gradients.elements(), kTrainable);
    for (const auto& piece : unit.updated()) EXPECT_TRUE(unit.table()[static_cast<std::size_t>(piece.param)].trainable);
    frozen.begin_step();
    EXPECT_FALSE(frozen.has_trainable());
    EXPECT_EQ(frozen.state_elements(), 0);
    EXPECT_TRUE(frozen.updated().empty());
    frozen.reduce();
    frozen.finish_reduction();
    EXPECT_TRUE(comm.ledger().entries().empty());
    const auto lease = frozen.acquire(Pass::Forward);
    EXPECT_EQ(read(frozen, 0), start_values(frozen.table()[0], 1));
  });
}

TEST(ShardUnit, KnowsWhichParametersABackwardWrote) {
  for (const Strategy strategy : kStrategies)
    on_ranks(2, [&](Communicator& comm) {
      CpuDevice device;
      ShardUnit unit(odd_unit(), "block", device, comm, {.strategy = strategy, .reductions_per_step = 2});
      for (int step = 0; step < 2; ++step) {
        unit.begin_step();
        for (int p = 0; p < 6; ++p) EXPECT_FALSE(unit.written(p));
        unit.gradients(Tag::Workspace).data(step == 0 ? 0 : 2);
        unit.reduce();
        unit.gradients(Tag::Workspace).data(3);
        unit.reduce();
        unit.finish_reduction();
        for (int p = 0; p < 6; ++p)
          EXPECT_EQ(unit.written(p), p == (step == 0 ? 0 : 2) || p == 3) << name_of(strategy) << ' ' << p;
      }
    });
}

TEST(ShardUnit, AReductionNeedsGradients) {
  on_ranks(1, [](Communicator& comm) {
    CpuDevice device;
    ShardUnit unit(odd_unit(), "block", device, comm, {});
    EXPECT_EQ(message_of([&] { unit.reduce(); }), "block 3: reduced without gradients");
  });
}

// ---- what the optimizer sees ----------------------------------------------------------------------------------------

TEST(ShardUnit, TheOptimizersPiecesCoverEveryTrainableElementOnce) {
  for (const UnitSpec& spec : {odd_unit(), tiny_unit(), frozen_unit()})
    for (int world = 1; world <= 4; ++world)
      for (const Strategy strategy : kStrategies) {
        Whole updated, normed, start;
        on_ranks(world, [&](Communicator& comm) {
          CpuDevice device;
          ShardUnit unit(spec, "block", device, comm, {.strategy = strategy});
          const auto pieces = unit.updated();
          std::vector<int> state(static_cast<std::size_t>(unit.state_elements()), 0);
          for (const ShardUnit::OwnedPiece& piece : pieces)
            for (std::int64_t i = 0; i < piece.size; ++i)
              EXPECT_EQ(++state.at(static_cast<std::size_t>(piece.state + i)), 1);
          if (strategy != Strategy::None || comm.rank() == 0) updated.add(unit, pieces, &ShardUnit::OwnedPiece::value);
          normed.add(unit, unit.normed(), &ShardUnit::OwnedPiece::value);
        });
        std::map<std::string, Floats> expected;
        for (const ParamInfo& info : spec.params)
          if (info.trainable) expected[info.name] = start_values(info, 1);
        EXPECT_EQ(updated.values(), expected) << spec.name << ", " << world << " ranks, " << name_of(strategy);
        EXPECT_EQ(normed.values(), expected) << spec.name << ", " << world << " ranks, " << name_of(strategy);
      }
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

// ---- bf16 -----------------------------------------------------------------------------------------------------------

Floats rounded(const Floats& x) {
  std::vector<Bf16> y(x.size());
  kernels().round(y.data(), x.data(), static_cast<std::int64_t>(x.size()));
  Floats wide;
  for (const Bf16 v : y) wide.push_back(to_float(v));
  return wide;
}
Floats read_bf16(ShardUnit& unit, int i) {
  const auto* data = static_cast<const Bf16*>(unit.data(i));
  Floats values;
  for (std::int64_t k = 0; k < unit.table()[static_cast<std::size_t>(i)].shape.numel(); ++k)
    values.push_back(to_float(data[k]));
  return values;
}

// What operations read is rounded, on every rank the same; what is updated is not, and what is gathered is bf16.
TEST(Bf16ShardUnit, GathersRoundedParametersAndUpdatesExactOnes) {
  for (const Strategy strategy : kStrategies)
    for (const int world : {1, 3}) {
      SCOPED_TRACE(toy::name_of(strategy));
      Whole values;
      on_ranks(world, [&](Communicator& comm) {
        CpuDevice device;
        ShardUnit unit(odd_unit(), "block", device, comm, {.strategy = strategy, .seed = 5, .compute = DType::BF16});
        const auto expect_rounded = [&](float added) {
          const auto lease = unit.acquire(Pass::Forward);
          for (int i = 0; i < 6; ++i) {
            Floats exact = start_values(unit.table()[static_cast<std::size_t>(i)], 5);
            if (unit.table()[static_cast<std::size_t>(i)].trainable)
              for (float& v : exact) v += added;
            EXPECT_EQ(read_bf16(unit, i), rounded(exact)) << i;
          }
        };
        EXPECT_EQ(unit.dtype(), DType::BF16);
        expect_rounded(0);
        constexpr float kSmall = 0x1p-12F;  // less than a rounding of most values
        for (const ShardUnit::OwnedPiece& piece : unit.updated())
          for (std::int64_t i = 0; i < piece.size; ++i) piece.value[i] += kSmall;
        unit.parameters_changed();
        unit.finish_refresh();
        expect_rounded(kSmall);
        const Buffer whole = unit.whole_values(ShardUnit::Part::Trainable, Pass::Save);
        for (int i = 0; i < 6; ++i) {
          const ParamInfo& info = unit.table()[static_cast<std::size_t>(i)];
          if (!info.trainable) continue;
          Floats exact = start_values(info, 5);
          for (float& v : exact) v += kSmall;
          const float* value = whole.data<float>() + unit.offset(i);
          EXPECT_EQ(Floats(value, value + info.shape.numel()), exact) << i;
        }
        for (const auto& [key, counts] : comm.ledger().entries())
          if (key.collective == Collective::AllGather) {
            EXPECT_EQ(key.dtype, key.pass == Pass::Save ? DType::F32 : DType::BF16) << regather::name_of(key.pass);
          }
        if (strategy == Strategy::Full && world == 3) {
          const std::int64_t shard = ceil_div(kTrainable, 3) + ceil_div(kFrozen, 3);
          EXPECT_EQ(comm.ledger().entries().at({Collective::AllGather, "block", Pass::Forward, DType::BF16}).wire_bytes,
                    2 * 2 * shard * 2);
        }
      });
    }
}

TEST(Bf16ShardUnit, HoldsAnFp32ShardAndHalfAsLargeAFullCopy) {
  on_ranks(2, [&](Communicator& comm) {
    for (const Strategy strategy : kStrategies) {
      CpuDevice device;
      ShardUnit unit(odd_unit(), "block", device, comm, {.strategy = strategy, .compute = DType::BF16});
      const std::int64_t shard = ceil_div(kTrainable, 2) + ceil_div(kFrozen, 2);
      const std::int64_t kept = strategy == Strategy::None ? 2 * shard * 4 : shard * 4;
      const std::int64_t replica = strategy == Strategy::Full ? 0 : 2 * shard * 2;
      EXPECT_EQ(device.memory.live(Tag::Parameters), kept + replica) << toy::name_of(strategy);
      const auto lease = unit.acquire(Pass::Forward);
      EXPECT_EQ(device.memory.live(Tag::Gathered), strategy == Strategy::Full ? 2 * shard * 2 : 0);
    }
  });
}

// A bf16 sum of 512 ones stops at 256, and one of 1, 2^-9, 2^-9 and 2^-9 at 1.
TEST(Bf16ShardUnit, AddsUpGradientsOfMicroBatchesAndRanksInFp32) {
  on_ranks(4, [&](Communicator& comm) {
    CpuDevice device;
    ShardUnit unit(odd_unit(), "block", device, comm,
                   {.strategy = Strategy::None, .reductions_per_step = 513, .compute = DType::BF16});
    unit.begin_step();
    for (int micro_batch = 0; micro_batch < 512; ++micro_batch) {
      unit.gradients(Tag::Workspace).data(0)[0] += comm.rank() == 0 ? 1.0F : 0.0F;
      unit.reduce();
    }
    unit.gradients(Tag::Workspace).data(0)[1] += comm.rank() == 0 ? 1.0F : 0x1p-9F;
    unit.reduce();
    unit.finish_reduction();
    const auto pieces = unit.updated();
    EXPECT_EQ(pieces.front().gradient[0], 512.0F);
    EXPECT_EQ(pieces.front().gradient[1], 1 + 3 * 0x1p-9F);
  });
}

}  // namespace
}  // namespace regather
