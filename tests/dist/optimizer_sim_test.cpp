// The sharded optimizer: which elements decay wherever a shard is cut, the norm, clipping, and that neither the number
// of ranks nor the strategy changes an update.
#include "dist/optimizer.h"

#include <algorithm>

#include "tests/dist/toy_units.h"

namespace regather {
namespace {

using namespace toy;

using Units = std::vector<std::unique_ptr<ShardUnit>>;
using Parameters = std::map<std::string, Floats>;
enum class Gradient { Zero, Same, ByRank };

Units make_units(Device& device, Communicator& comm, Strategy strategy) {
  Units units;
  for (const UnitSpec& spec : {odd_unit("block 0"), odd_unit("block 1"), tiny_unit(), frozen_unit()})
    units.push_back(std::make_unique<ShardUnit>(spec, "block", device, comm, UnitOptions{.strategy = strategy}));
  return units;
}

// One backward and its reduction. Same: what all ranks contribute together does not depend on how many they are.
void backward(Units& units, Communicator& comm, Gradient gradient, int k = 0) {
  for (auto& unit : units) {
    unit->begin_step();
    if (!unit->has_trainable()) continue;
    unit->gradients(Tag::Workspace);
    if (gradient == Gradient::ByRank || (gradient == Gradient::Same && comm.rank() == 0))
      contribute(*unit, comm.rank(), Tag::Workspace, k);
    unit->reduce();
  }
  for (auto& unit : units) unit->finish_reduction();
}
void update(Units& units, ShardedOptimizer& optimizer, double lr, double scale, std::int64_t step) {
  optimizer.step(lr, scale, step);
  for (auto& unit : units) unit->parameters_changed();
  for (auto& unit : units) unit->finish_refresh();
}
Parameters start_parameters() {
  Parameters all;
  for (const UnitSpec& spec : {odd_unit("block 0"), odd_unit("block 1"), tiny_unit(), frozen_unit()})
    for (const ParamInfo& info : spec.params) all[info.name] = start_values(info, 1);
  return all;
}

struct Outcome {
  Parameters parameters;        // as rank 0's next forward reads them
  std::vector<double> squares;  // of the gradient, after their sum over ranks, by rank
};
struct Options {
  OptimizerOptions optimizer{};
  Gradient gradient = Gradient::Same;
  double lr = 1e-2, scale = 1;
  int steps = 1;
};
Outcome train(int world, Strategy strategy, const Options& o) {
  Outcome out;
  out.squares.resize(static_cast<std::size_t>(world));
  on_ranks(world, [&](Communicator& comm) {
    CpuDevice device;
    Units units = make_units(device, comm, strategy);
    ShardedOptimizer optimizer(units, device, o.optimizer);
    for (int step = 1; step <= o.steps; ++step) {
      backward(units, comm, o.gradient, step);
      double squares = optimizer.gradient_squares();
      comm.all_reduce(std::span(&squares, 1), {"scalars", Pass::Step});
      out.squares[static_cast<std::size_t>(comm.rank())] = squares;
      update(units, optimizer, o.lr, o.scale, step);
    }
    for (auto& unit : units) {
      const auto lease = unit->acquire(Pass::Forward);
      for (int p = 0; p < static_cast<int>(unit->table().size()); ++p) {
        Floats values = read(*unit, p);
        if (comm.rank() == 0) out.parameters[unit->table()[static_cast<std::size_t>(p)].name] = std::move(values);
      }
    }
  });
  return out;
}

bool decays(const std::string& name) {  // written down here, not asked
  return name.ends_with("block 0.weight") || name.ends_with("block 1.weight") || name.ends_with(".scale") ||
         name == "tiny.weight";
}

TEST(ShardedOptimizer, DecayScalesExactlyTheParametersThatDecay) {
  for (const auto type : {OptimizerOptions::Type::AdamW, OptimizerOptions::Type::Sgd})
    for (int world = 1; world <= 4; ++world)
      for (const Strategy strategy : kStrategies) {
        const Parameters start = start_parameters();
        const Parameters after =
            train(world, strategy, {.optimizer = {.type = type, .weight_decay = 0.5}, .gradient = Gradient::Zero})
                .parameters;
        ASSERT_EQ(after.size(), start.size());
        for (const auto& [name, values] : start) {
          Floats expected = values;
          for (float& v : expected)
            if (decays(name)) v = type == OptimizerOptions::Type::AdamW ? v * (1.0F - 0.005F) : v - 1e-2F * (v * 0.5F);
          for (std::size_t i = 0; i < values.size(); ++i) {
            if (type == OptimizerOptions::Type::AdamW || !decays(name)) {
              EXPECT_EQ(after.at(name)[i], expected[i])
                  << name << ' ' << i << ", " << world << " ranks, " << name_of(strategy);
            } else {
              EXPECT_FLOAT_EQ(after.at(name)[i], expected[i]) << name << ' ' << i;
            }
          }
        }
      }
}

TEST(ShardedOptimizer, NeitherRanksNorStrategyChangeAnUpdate) {
  for (const auto type : {OptimizerOptions::Type::AdamW, OptimizerOptions::Type::Sgd}) {
    const Options options{.optimizer = {.type = type, .weight_decay = 0.1}, .steps = 3};
    const Parameters reference = train(1, Strategy::Full, options).parameters;
    EXPECT_NE(reference, start_parameters());
    for (int world = 1; world <= 4; ++world)
      for (const Strategy strategy : kStrategies)
        EXPECT_EQ(train(world, strategy, options).parameters, reference) << world << " ranks, " << name_of(strategy);
  }
}

TEST(ShardedOptimizer, AdamWFollowsItsFormulaOverSteps) {
  const OptimizerOptions o{.beta1 = 0.8, .beta2 = 0.9, .eps = 1e-6, .weight_decay = 0.3};
  const Parameters after = train(3, Strategy::Full, {.optimizer = o, .scale = 0.5, .steps = 4}).parameters;
  const Floats start = start_parameters().at("block 1.weight");
  for (std::size_t i = 0; i < start.size(); ++i) {
    double p = start[i], m = 0, v = 0;
    for (int step = 1; step <= 4; ++step) {
      const double g = 0.5 * static_cast<double>(contribution(0, 0, static_cast<std::int64_t>(i), step));
      m = 0.8 * m + 0.2 * g;
      v = 0.9 * v + 0.1 * g * g;
      p = p * (1 - 1e-2 * 0.3) -
          1e-2 * (m / (1 - std::pow(0.8, step))) / (std::sqrt(v / (1 - std::pow(0.9, step))) + 1e-6);
    }
    EXPECT_NEAR(after.at("block 1.weight")[i], p, 2e-6) << i;
  }
}

TEST(ShardedOptimizer, FrozenParametersDoNotMove) {
  const Parameters start = start_parameters();
  for (const Strategy strategy : kStrategies) {
    const Parameters after = train(2, strategy, {.optimizer = {.weight_decay = 0.5}, .steps = 3}).parameters;
    for (const auto& [name, values] : start) {
      if (name.find("frozen") != std::string::npos) {
        EXPECT_EQ(after.at(name), values) << name;
      }
    }
  }
}

TEST(ShardedOptimizer, TheNormIsOneNumberWhateverTheRanksAndTheStrategy) {
  double expected = 0;
  for (const UnitSpec& spec : {odd_unit("block 0"), odd_unit("block 1"), tiny_unit()})
    for (int p = 0; p < static_cast<int>(spec.params.size()); ++p)
      for (std::int64_t i = 0; spec.params[static_cast<std::size_t>(p)].trainable &&
                               i < spec.params[static_cast<std::size_t>(p)].shape.numel();
           ++i)
        expected += std::pow(static_cast<double>(contribution(0, p, i, 1)), 2);
  for (int world = 1; world <= 4; ++world) {
    const double full = train(world, Strategy::Full, {}).squares[0];
    EXPECT_NEAR(full, expected, 1e-12 * expected);
    for (const Strategy strategy : kStrategies)
      for (const double squares : train(world, strategy, {}).squares)
        EXPECT_EQ(squares, full) << world << " ranks, " << name_of(strategy);
  }
}

TEST(ShardedOptimizer, GradientsOfAllRanksAreCountedOnceInTheNorm) {
  for (const Strategy strategy : kStrategies) {
    double expected = 0;
    for (const UnitSpec& spec : {odd_unit("block 0"), odd_unit("block 1"), tiny_unit()})
      for (int p = 0; p < static_cast<int>(spec.params.size()); ++p)
        for (std::int64_t i = 0; spec.params[static_cast<std::size_t>(p)].trainable &&
                                 i < spec.params[static_cast<std::size_t>(p)].shape.numel();
             ++i)
          expected += std::pow(static_cast<double>(contribution(0, p, i, 1) + contribution(1, p, i, 1)), 2);
    const auto squares = train(2, strategy, {.gradient = Gradient::ByRank}).squares;
    EXPECT_NEAR(squares[0], expected, 1e-12 * expected);
    EXPECT_EQ(squares[0], squares[1]);
  }
}

TEST(ClipScale, IsPyTorchs) {
  EXPECT_EQ(clip_scale(2.0, 0), 1.0) << "0: not clipped";
  EXPECT_EQ(clip_scale(2.0, 1e9), 1.0) << "inactive: exactly one, so that gradients stay as they are to the bit";
  EXPECT_EQ(clip_scale(0.25, 0.5), 1.0);
  EXPECT_EQ(clip_scale(0.0, 0.5), 1.0);
  EXPECT_DOUBLE_EQ(clip_scale(2.0, 0.5), 0.5 / (2.0 + 1e-6));
  for (const double norm : {0.6, 3.0, 1e6}) EXPECT_NEAR(norm * clip_scale(norm, 0.5), 0.5, 1e-6);
}

TEST(ShardedOptimizer, ScalingInTheUpdateIsScalingTheGradient) {  // by a power of two: to the bit
  const Options sgd{.optimizer = {.type = OptimizerOptions::Type::Sgd, .weight_decay = 0}, .lr = 0.5};
  Options half = sgd;
  half.scale = 0.5;
  const Parameters start = start_parameters(), whole = train(2, Strategy::Full, sgd).parameters,
                   scaled = train(2, Strategy::Full, half).parameters;
  const UnitSpec spec = odd_unit("block 0");
  for (std::int64_t i = 0; i < 15; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const float g = contribution(0, 0, i, 1), p = start.at("block 0.weight")[at];
    EXPECT_EQ(whole.at("block 0.weight")[at], p - 0.5F * g);
    EXPECT_EQ(scaled.at("block 0.weight")[at], p - 0.25F * g);
  }
}

TEST(ShardedOptimizer, StateExistsForTheElementsThatTheRankUpdates) {
  for (int world = 1; world <= 4; ++world)
    for (const Strategy strategy : kStrategies)
      for (const auto type : {OptimizerOptions::Type::AdamW, OptimizerOptions::Type::Sgd})
        on_ranks(world, [&](Communicator& comm) {
          CpuDevice device;
          Units units = make_units(device, comm, strategy);
          const ShardedOptimizer optimizer(units, device, {.type = type});
          const std::int64_t shard = 2 * ceil_div(kTrainable, world) + ceil_div(2, world);
          const std::int64_t held = shard * (strategy == Strategy::None ? world : 1);
          EXPECT_EQ(device.memory.live(Tag::Optimizer), type == OptimizerOptions::Type::AdamW ? 2 * 4 * held : 0);
        });
}

TEST(ShardedOptimizer, SaysWhichParametersHaveAGradientThatIsNotZero) {
  for (int world = 1; world <= 4; ++world)
    for (const Strategy strategy : kStrategies)
      on_ranks(world, [&](Communicator& comm) {
        CpuDevice device;
        Units units = make_units(device, comm, strategy);
        ShardedOptimizer optimizer(units, device, {});
        backward(units, comm, Gradient::Zero);
        EXPECT_EQ(optimizer.gradient_squares(), 0);
        std::vector<double> none = optimizer.nonzero_gradients();
        EXPECT_EQ(none, std::vector<double>(9, 0.0));
        for (auto& unit : units) unit->begin_step();
        for (std::size_t u = 0; u < 3; ++u) {
          UnitGradients& gradients = units[u]->gradients(Tag::Workspace);
          if (u == 1 && comm.rank() == world - 1)
            gradients.data(3)[6] = 1e-30F;  // the gain's last element, on one rank
          units[u]->reduce();
          units[u]->finish_reduction();
        }
        optimizer.gradient_squares();
        std::vector<double> one = optimizer.nonzero_gradients();
        comm.all_reduce(one, {"scalars", Pass::Step});
        EXPECT_EQ(one, (std::vector<double>{0, 0, 0, 0, 0, 0, 1, 0, 0})) << world << " ranks, " << name_of(strategy);
      });
}

}  // namespace
}  // namespace regather
