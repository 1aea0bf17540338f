// Plans against others: within the same memory, nothing that could be kept or moved is faster.
#include "launcher/keep_plan.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/launcher/keep_plans.h"

namespace regather::testing {
namespace {

// Every combination of what two blocks keep, each run without storage: none that fits is faster.
TEST(KeepPlan, NothingThatCouldBeKeptIsFaster) {
  RunSetup s;
  s.model.layers = 3;
  const Config config = config_of(s);
  const Model model = make_model(s.model);
  const auto sets = keep_sets(model, {s.micro_batch, s.sequence}, Order::Lazy,
                              [](const Recorder::Interval& i) { return kCosts.seconds(i); });
  struct Combination {
    std::int64_t bytes;
    double seconds;
  };
  std::vector<Combination> all;  // every third: tests/ckpt/planner_test.cpp tries them all, without a model
  std::size_t pair = 0;
  for (const KeepSet& first : sets[0].sets)
    for (const KeepSet& second : sets[1].sets) {
      if (pair++ % 3 > 0) continue;
      const StepForecast f =
          forecast_step(with_plan(config, {.blocks = {first.plan, second.plan, sets[2].whole.plan}, .slots = 2}), model,
                        0, s.world, {.costs = &kCosts});
      all.push_back({f.peak_of[index(Tag::Activations)], f.seconds.total()});
    }
  EXPECT_GT(all.size(), 50U);
  const Range range = range_of(s);
  for (int part = 0; part <= 10; ++part) {
    const std::int64_t budget = range.least + (range.most - range.least) * part / 10;
    const KeepPlan plan = plan_within(s, budget);
    double fastest = 1e300;
    for (const Combination& c : all)
      if (c.bytes <= budget) fastest = std::min(fastest, c.seconds);
    EXPECT_LE(plan.frontier[plan.chosen].seconds, 1.0001 * fastest) << part;
  }
}

TEST(KeepPlan, FastCopiesSpareWhatWouldRunAgainAndSlowOnesAreNotMade) {
  RunSetup s;
  s.model.layers = 6;
  const Model model = make_model(s.model);
  const Range here = range_of(s);
  const auto chosen = [&](double speed) {
    const KeepPlan plan = make_keep_plan(moving(s, (here.least + here.most) / 2), model, s.world, copying_at(speed));
    return plan.frontier[plan.chosen];
  };
  const KeepPlan stays = plan_within(s, (here.least + here.most) / 2);
  const KeepPlan::Point fast = chosen(1e14), slow = chosen(1e6);
  EXPECT_GT(fast.host, 0);
  EXPECT_LT(fast.seconds, stays.frontier[stays.chosen].seconds);
  EXPECT_EQ(slow.host, 0);
  EXPECT_DOUBLE_EQ(slow.seconds, stays.frontier[stays.chosen].seconds);
}

// Any sets of any two blocks, any of their values in host memory, drawn at random and run without storage.
TEST(KeepPlan, NothingThatCouldBeMovedIsFasterByAPercent) {
  RunSetup s;
  s.model.layers = 3;
  const Model model = make_model(s.model);
  for (const double speed : {3e9, 3e10}) {
    const CostModel costs = copying_at(speed);
    const Config config = moving(s, 0);
    const auto sets = keep_sets(
        model, {s.micro_batch, s.sequence}, Order::Lazy, [&](const Recorder::Interval& i) { return costs.seconds(i); },
        Movable::Asked);
    std::mt19937 random(1);
    const auto any = [&](const BlockKeepSets& of) {
      const KeepSet& set = of.sets[random() % of.sets.size()];
      Move move;
      for (const auto& [name, bytes] : set.movable)
        if (random() % 2 > 0) move.names.push_back(name);
      return with_move(set.plan, move);
    };
    const KeepPlan all = explore_keep_plans(config, model, s.world, costs);
    for (int i = 0; i < 10; ++i) {
      const StepForecast f =
          forecast_step(with_plan(config, {.blocks = {any(sets[0]), any(sets[1]), sets[2].whole.plan}, .slots = 2}),
                        model, 0, s.world, {.costs = &costs});
      const std::int64_t bytes = f.peak_of[index(Tag::Activations)];
      ASSERT_GE(bytes, all.frontier.front().bytes);
      const KeepPlan plan = make_keep_plan(moving(s, bytes), model, s.world, costs);
      EXPECT_LE(plan.frontier[plan.chosen].seconds, 1.01 * f.seconds.total()) << i;
    }
  }
}

TEST(KeepPlan, ABudgetThatIsTooSmallIsRefusedWithTheLeastThatIsEnough) {
  const RunSetup s;
  const std::int64_t least = range_of(s).least;
  try {
    plan_within(s, least - 1);
    FAIL() << "was planned";
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("activation_checkpointing.budget: value "), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find(fmt::format("({} bytes) or more", least)), std::string::npos) << e.what();
  }
  EXPECT_EQ(plan_within(s, least).frontier[0].bytes, least);
}

// What a configuration offloads by name is no part of what can be planned, nor in its way.
TEST(KeepPlan, WhatCanBePlannedIsTheSameWhateverIsOffloadedByName) {
  Config c = config_of(RunSetup{});
  const Model model = make_model(c.model);
  const auto least = [&] { return explore_keep_plans(c, model, 2, kCosts).frontier.front().bytes; };
  c.activation_checkpointing.policy = "selective";
  const std::int64_t stays = least();
  c.activation_checkpointing.offload.marks = {"marks"};
  EXPECT_EQ(least(), stays);
}

TEST(KeepSets, RunFromTheInputAloneToEverything) {
  const RunSetup s;
  const auto sets = keep_sets(make_model(s.model), {s.micro_batch, s.sequence}, Order::Lazy,
                              [](const Recorder::Interval& i) { return kCosts.seconds(i); });
  const std::int64_t input = s.micro_batch * s.sequence * s.model.hidden * 4;
  for (const BlockKeepSets& of_block : sets) {
    EXPECT_EQ(of_block.nothing.activations.kept, input);
    EXPECT_EQ(of_block.sets.front().activations.kept, input);
    EXPECT_LT(of_block.whole.flops, of_block.nothing.flops);
    EXPECT_EQ(of_block.whole.keep, (std::vector<std::string>{"attn.qkv", "attn.core", "mid", "mlp.up"}));
    EXPECT_TRUE(of_block.nothing.keep.empty());
    EXPECT_TRUE(std::ranges::any_of(of_block.sets, [&](const KeepSet& set) {
      return set.flops <= of_block.whole.flops && set.activations.kept == of_block.whole.activations.kept;
    }));
    EXPECT_LE(of_block.sets.back().activations.kept, of_block.whole.activations.kept);
    for (std::size_t i = 1; i < of_block.sets.size(); ++i)
      EXPECT_GE(of_block.sets[i].activations.kept, of_block.sets[i - 1].activations.kept);
  }
}

}  // namespace
}  // namespace regather::testing
