// What must not change numbers does not change a bit: policies, slots, prefetch, evaluation in between. What may change
// them by rounding stays within stated bounds: the number of ranks, the order of accumulation, the strategy.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <thread>

#include "tests/launcher/training_run.h"

namespace regather::testing {
namespace {

// Layers that keep different things.
std::vector<SavePlan> mixed_plans(int layers) {
  const std::vector<SavePlan> plans{drop_all(), keep_only({"mid", "mlp.up"}), keep_all(), keep_only({"attn.core"})};
  std::vector<SavePlan> all;
  for (int b = 0; b < layers; ++b) all.push_back(plans[static_cast<std::size_t>(b) % plans.size()]);
  return all;
}

// Nothing runs again but what is cheap, of the last layer.
PolicyOptions kept_whole(int layers = 4) {
  return {.policy = "budget", .planned = std::vector<SavePlan>(static_cast<std::size_t>(layers), keep_all())};
}

// Every policy of the table.
std::vector<PolicyOptions> table_of(int layers) {
  std::vector<PolicyOptions> all;
  for (const Policy& policy : policies())
    all.push_back({.policy = std::string(policy.name), .layers = {1, layers - 1}, .planned = mixed_plans(layers)});
  return all;
}

// And options of some.
std::vector<PolicyOptions> policies_of(int layers) {
  const std::vector<PolicyOptions> options{
      {.policy = "full", .order = Order::Ahead},
      {.policy = "full", .order = Order::Eager},
      {.policy = "segments", .segments = 1},
      {.policy = "segments", .segments = 3},
      {.policy = "selective", .keep = {{.keep = {"qkv", "attention_core", "mlp.up"}}}},
      {.policy = "selective",
       .keep = {{.keep = {"*"}}, {.layers = {0, 2}, .keep = {"norms", "mid"}}},
       .order = Order::Ahead},
      {.policy = "none", .offload = {.names = {"all"}}},
      {.policy = "full", .offload = {.names = {"all"}, .depth = 2}},
      {.policy = "segments", .segments = 2, .offload = {.names = {"all"}}},
      {.policy = "selective",
       .keep = {{.keep = {"qkv", "mlp", "mid"}}},
       .offload = {.names = {"input", "mlp", "mid"}, .keep_last = 1}}};
  std::vector<PolicyOptions> all = table_of(layers);
  all.insert(all.end(), options.begin(), options.end());
  return all;
}

std::vector<std::string> models() {
  std::vector<std::string> names;
  for (const ModelType& type : built_in_models()) names.push_back(type.name);
  return names;
}

std::string describe(const RunSetup& s) {
  return fmt::format("{} {} world {} strategy {} slots {} micro-batches {} order {} reduce {}", s.model.type,
                     s.policy.policy, s.world, static_cast<int>(s.strategy), s.plan.slots, s.plan.micro_batches,
                     static_cast<int>(s.plan.order), static_cast<int>(s.plan.reduce));
}

void expect_same_bits(const RunResult& a, const RunResult& b, const RunSetup& s) {
  EXPECT_EQ(a.losses, b.losses) << describe(s);
  EXPECT_EQ(a.norms, b.norms) << describe(s);
  EXPECT_TRUE(a.gradients == b.gradients) << describe(s);
  EXPECT_TRUE(a.parameters == b.parameters) << describe(s);
}

// |difference| <= bound x the largest of the tensor, for every tensor.
void expect_close(const RunResult& a, const RunResult& b, float bound, const std::string& what) {
  ASSERT_EQ(a.gradients.size(), b.gradients.size());
  float largest_of_all = 0;
  for (const auto& [name, values] : b.gradients)
    for (float v : values) largest_of_all = std::max(largest_of_all, std::abs(v));
  for (const auto& [name, values] : b.gradients) {
    float largest = 0, difference = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      largest = std::max(largest, std::abs(values[i]));
      difference = std::max(difference, std::abs(values[i] - a.gradients.at(name)[i]));
    }
    // The bias of the keys has a gradient that is zero but for rounding: measured against the largest of all tensors.
    EXPECT_LE(difference, std::max(bound * largest, 1e-6F * largest_of_all)) << what << ": " << name;
  }
}

class Equivalence : public ::testing::TestWithParam<std::string> {
 protected:
  RunSetup setup() const { return setup_of(GetParam()); }

  // In both orders of accumulation, and reduced at both times.
  void expect_same_bits_of_every_plan(Strategy strategy, int world, const std::vector<PolicyOptions>& all) const {
    for (const auto& [order, reduce] : {std::pair(AccumulationOrder::BatchMajor, ReduceWhen::EachMicroBatch),
                                        std::pair(AccumulationOrder::BatchMajor, ReduceWhen::Once),
                                        std::pair(AccumulationOrder::LayerMajor, ReduceWhen::EachMicroBatch)}) {
      RunSetup s = setup();
      s.strategy = strategy;
      s.world = world;
      s.plan.order = order;
      s.plan.reduce = reduce;
      s.plan.micro_batches = 2;
      s.steps = world == 2 ? 2 : 1;
      s.policy = kept_whole();
      const RunResult reference = train(s);
      for (const PolicyOptions& policy : all) {
        s.policy = policy;
        expect_same_bits(train(s), reference, s);
      }
    }
  }
};

TEST_P(Equivalence, EveryPolicyGivesTheSameBits) {
  for (const int world : {1, 2, 3, 4}) expect_same_bits_of_every_plan(Strategy::Full, world, table_of(4));
}
TEST_P(Equivalence, EveryOptionOfAPolicyGivesTheSameBits) {
  expect_same_bits_of_every_plan(Strategy::Full, 2, policies_of(4));
}
TEST_P(Equivalence, EveryPolicyGivesTheSameBitsUnderEveryStrategy) {
  for (const Strategy strategy : {Strategy::Gradients, Strategy::Optimizer, Strategy::None})
    expect_same_bits_of_every_plan(strategy, 2, table_of(4));
}

TEST_P(Equivalence, DropoutDrawsTheSameMasksWhenRunAgain) {
  RunSetup s = setup();
  s.model.dropout = 0.1F;
  s.policy = kept_whole();
  const RunResult reference = train(s);
  for (const PolicyOptions& policy : policies_of(4)) {
    RunSetup with = s;
    with.policy = policy;
    with.audit = 1;  // which finds no difference, either
    expect_same_bits(train(with), reference, with);
  }
  RunSetup other_seed = s;
  other_seed.seed = 2;
  EXPECT_NE(train(other_seed).losses, reference.losses);
  RunSetup without = s;
  without.model.dropout = 0;
  EXPECT_NE(train(without).losses, reference.losses);
}

// Copies that are slower than the computation, in either direction, for many steps of several micro-batches.
TEST_P(Equivalence, SlowCopiesOfOffloadedValuesChangeNoBit) {
  RunSetup s = setup();
  s.model.dropout = 0.1F;
  s.model.layers = 6;
  s.plan.micro_batches = 2;
  s.steps = 3;
  for (const auto order : {AccumulationOrder::BatchMajor, AccumulationOrder::LayerMajor}) {
    s.plan.order = order;
    s.policy = {.policy = "none"};
    s.prepare = nullptr;
    const RunResult reference = train(s);
    for (const Stream slow : {Stream::ToHost, Stream::ToDevice})
      for (const int depth : {1, 2, 5})
        for (const char* policy : {"none", "full"}) {
          s.policy = {.policy = policy, .offload = {.names = {"all"}, .depth = depth}};
          s.prepare = [slow](CpuDevice& device) {
            device.before_copy = [slow, copies = 0](Stream stream, std::int64_t) mutable {
              if (stream == slow && ++copies % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
            };
          };
          expect_same_bits(train(s), reference, s);
        }
  }
}

// The same batch at a learning rate of zero: every step has the same gradient, or something of the step before was
// left.
TEST_P(Equivalence, AccumulatedGradientsOfOffloadedStepsDoNotGrow) {
  RunSetup s = setup();
  s.plan.micro_batches = 4;
  s.micro_batch = 1;
  s.steps = 5;
  s.lr = 0;
  s.same_batch = true;
  for (const auto reduce : {ReduceWhen::EachMicroBatch, ReduceWhen::Once}) {
    s.plan.reduce = reduce;
    s.policy = {.policy = "none"};
    const RunResult reference = train(s);
    s.policy = {.policy = "full", .offload = {.names = {"all"}}};
    const RunResult r = train(s);
    expect_same_bits(r, reference, s);
    for (const double norm : r.norms) EXPECT_EQ(norm, r.norms[0]);
  }
}

TEST_P(Equivalence, DropoutMasksDoNotDependOnTheNumberOfRanks) {
  RunSetup s = setup();
  s.model.dropout = 0.1F;
  s.world = 1;
  s.micro_batch = 4;
  const RunResult one = train(s);
  s.world = 4;
  s.micro_batch = 1;
  const RunResult four = train(s);
  EXPECT_NEAR(one.losses[0], four.losses[0], 2e-6 * one.losses[0]);
}

TEST_P(Equivalence, SlotsAndPrefetchGiveTheSameBits) {
  RunSetup s = setup();
  s.policy.policy = "full";
  s.plan.micro_batches = 2;
  const RunResult reference = train(s);
  for (int slots = 1; slots <= 4; ++slots)
    for (int prefetch = 0; prefetch <= 3; ++prefetch) {
      s.plan.slots = slots;
      s.prefetch = prefetch;
      expect_same_bits(train(s), reference, s);
    }
}

TEST_P(Equivalence, TheSameGlobalBatchOnAnyNumberOfRanks) {
  RunSetup s = setup();
  s.world = 1;
  s.micro_batch = 12;
  s.steps = 3;
  s.optimizer.type = OptimizerOptions::Type::Sgd;  // Adam makes steps of rounding noise where a gradient is almost zero
  const RunResult one = train(s);
  for (const int world : {2, 3, 4})
    for (const Strategy strategy : {Strategy::Full, Strategy::Gradients, Strategy::Optimizer, Strategy::None}) {
      s.world = world;
      s.micro_batch = 12 / world;
      s.strategy = strategy;
      const RunResult many = train(s);
      for (std::size_t i = 0; i < one.losses.size(); ++i) {
        EXPECT_NEAR(many.losses[i], one.losses[i], 2e-6 * one.losses[i]) << world << " ranks, step " << i;
        EXPECT_NEAR(many.norms[i], one.norms[i], 1e-5 * one.norms[i]) << world << " ranks, step " << i;
      }
      expect_close(many, one, 1e-5F, fmt::format("{} ranks, {}", world, describe(s)));
    }
}

TEST_P(Equivalence, AccumulationGivesTheGradientOfTheWholeBatch) {
  RunSetup s = setup();
  s.micro_batch = 8;
  s.steps = 1;
  const RunResult whole = train(s);
  for (const int micro_batches : {2, 4})
    for (const auto order : {AccumulationOrder::BatchMajor, AccumulationOrder::LayerMajor})
      for (const auto reduce : {ReduceWhen::EachMicroBatch, ReduceWhen::Once})
        for (const Strategy strategy : {Strategy::Full, Strategy::Optimizer, Strategy::None}) {
          s.micro_batch = 8 / micro_batches;
          s.plan.micro_batches = micro_batches;
          s.plan.order = order;
          s.plan.reduce = reduce;
          s.strategy = strategy;
          const RunResult parts = train(s);
          EXPECT_NEAR(parts.losses[0], whole.losses[0], 2e-6 * whole.losses[0]) << describe(s);
          EXPECT_NEAR(parts.norms[0], whole.norms[0], 1e-5 * whole.norms[0]) << describe(s);
          expect_close(parts, whole, 1e-5F, describe(s));
        }
}

TEST_P(Equivalence, EvaluationChangesNothing) {
  for (const Strategy strategy : {Strategy::Full, Strategy::Gradients})
    for (const std::string policy : {"none", "full"}) {
      RunSetup s = setup();
      s.strategy = strategy;
      s.policy.policy = policy;
      s.steps = 4;
      const RunResult without = train(s);
      s.evaluate_before = {0, 1, 1, 3};
      const RunResult with = train(s);
      expect_same_bits(with, without, s);
      EXPECT_EQ(with.collectives.back().size(), without.collectives.back().size());
      EXPECT_TRUE(differences(without.collectives.back(), with.collectives.back()).empty());
      EXPECT_EQ(with.evaluations[1], train(s).evaluations[1]);
    }
}

INSTANTIATE_TEST_SUITE_P(Models, Equivalence, ::testing::ValuesIn(models()),
                         [](const auto& model) { return model.param; });

}  // namespace
}  // namespace regather::testing
