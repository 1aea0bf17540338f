// Gradients of a unit: what its reductions add up, and what the optimizer sees of them.
#include <algorithm>
#include <optional>

#include "dist/shard_unit.h"
#include "tests/dist/toy_units.h"
#include "tests/message_of.h"

namespace regather {
namespace {

using namespace toy;
using std::chrono::microseconds;

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

}  // namespace
}  // namespace regather
