// Plans of real steps: what was planned is what the allocator counts, to the byte; nothing that could be kept is faster
// within the same memory; and numbers are those of policy none.
#include "launcher/keep_plan.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "tests/launcher/training_run.h"

namespace regather::testing {
namespace {

// Every operation at a tenth of a nanosecond a flop or byte: prices that every machine has.
const CostModel kCosts(MachineLimits{1e10, 1e10});

Config config_of(const RunSetup& s) {
  Config c;
  static_cast<ModelConfig&>(c.model) = s.model;
  c.model.chosen_vocab = s.model.vocab;
  c.data.files = {"none"};
  c.data.tokenizer = "bytes";
  c.data.sequence = s.sequence;
  c.train.micro_batch = s.micro_batch;
  c.train.accumulation = s.plan.micro_batches;
  c.train.accumulation_order = s.plan.order == AccumulationOrder::LayerMajor
                                   ? TrainConfig::AccumulationOrder::LayerMajor
                                   : TrainConfig::AccumulationOrder::BatchMajor;
  c.train.reduce = s.plan.reduce == ReduceWhen::Once ? TrainConfig::Reduce::Once : TrainConfig::Reduce::EachMicroBatch;
  c.sharding.resident_slots = s.plan.slots;
  c.precision.compute = s.compute == DType::BF16 ? PrecisionConfig::Type::Bf16 : PrecisionConfig::Type::Fp32;
  c.activation_checkpointing.policy = "budget";
  validate(c);
  return c;
}

KeepPlan plan_within(const RunSetup& s, std::int64_t budget) {
  Config c = config_of(s);
  c.activation_checkpointing.budget = budget;
  return make_keep_plan(c, make_model(s.model), s.world, kCosts);
}
KeepPlan plan_within_all(const RunSetup& s, std::int64_t limit, int slots) {
  Config c = config_of(s);
  c.activation_checkpointing.budget = 0;
  c.memory.limit = limit;
  c.sharding.resident_slots = slots;
  return make_keep_plan(c, make_model(s.model), s.world, kCosts);
}

RunSetup under(const RunSetup& s, const KeepPlan& plan) {
  RunSetup planned = s;
  planned.policy = {.policy = "budget", .planned = plan.blocks};
  planned.plan.slots = plan.slots;
  return planned;
}

struct Range {
  std::int64_t least, most;
};
Range range_of(const RunSetup& s) {
  const KeepPlan all = explore_keep_plans(config_of(s), make_model(s.model), s.world, kCosts);
  return {all.frontier.front().bytes, all.frontier.back().bytes};
}

// Both models, both orders of accumulation, with dropout.
std::vector<RunSetup> setups() {
  RunSetup batch_major;
  batch_major.model.dropout = 0.1F;
  batch_major.plan.micro_batches = 2;
  RunSetup layer_major = batch_major, llama = batch_major;
  layer_major.plan.order = AccumulationOrder::LayerMajor;
  llama.model.type = "llama";
  llama.model.tie_embeddings = false;
  llama.plan.micro_batches = 1;
  return {batch_major, layer_major, llama};
}

TEST(KeepPlan, ActivationsPeakAtExactlyThePlannedBytesAndNumbersStayTheSame) {
  for (const RunSetup& s : setups()) {
    const RunResult none = train(s);
    const Range range = range_of(s);
    std::int64_t before = 0;
    for (const int part : {0, 1, 4}) {
      const std::int64_t budget = range.least + (range.most - range.least) * part / 4;
      const KeepPlan plan = plan_within(s, budget);
      const RunResult r = train(under(s, plan));
      const std::int64_t peak = r.peak[index(Tag::Activations)];
      EXPECT_EQ(peak, plan.frontier[plan.chosen].bytes) << s.model.type << " part " << part;
      EXPECT_LE(peak, budget);
      EXPECT_GE(peak, before);
      before = peak;
      EXPECT_EQ(r.losses, none.losses);
      EXPECT_TRUE(r.gradients == none.gradients) << s.model.type << " part " << part;
      EXPECT_TRUE(r.parameters == none.parameters);
      EXPECT_TRUE(differences(none.collectives.back(), r.collectives.back()).empty());
      if (part == 4) {
        EXPECT_LE(r.recomputed_flops, none.recomputed_flops);
      }
    }
  }
}

TEST(KeepPlan, AllMemoryPeaksAtExactlyThePlannedBytes) {
  for (const RunSetup& s : setups())
    for (const int slots : {1, 2, 0}) {
      RunSetup fixed = s;
      fixed.plan.slots = std::max(1, slots);
      const std::int64_t most = train(fixed).peak_total;
      fixed.policy.policy = "full";
      fixed.plan.slots = 1;
      const std::int64_t least = train(fixed).peak_total;
      const std::int64_t limit = std::max(least, slots == 2 ? least + (most - least) * 3 / 4 : (least + most) / 2);
      const KeepPlan plan = plan_within_all(s, limit, slots);
      const RunResult r = train(under(s, plan));
      EXPECT_EQ(r.peak_total, plan.frontier[plan.chosen].bytes) << s.model.type << " slots " << slots;
      EXPECT_LE(r.peak_total, limit);
      if (slots > 0) {
        EXPECT_EQ(plan.slots, slots);
      }
    }
}

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

// ---- host memory ----------------------------------------------------------------------------------------------------

// Beside operations at 1e10 flops and bytes a second.
CostModel copying_at(double bytes_a_second) {
  return CostModel::from_json(fmt::format(
      R"({{"format": 1, "machine": "", "threads": 1, "ranks": 2, "limits": {{"flops": 1e10, "bytes": 1e10}},
          "seconds_a_wire_byte": 0, "overhead_an_operation": 0,
          "seconds_a_copied_byte": {{"to_host": {0}, "to_device": {0}}}, "operations": []}})",
      1 / bytes_a_second));
}

Config moving(const RunSetup& s, std::int64_t budget) {
  Config c = config_of(s);
  c.activation_checkpointing.offload.marks = {"auto"};
  c.activation_checkpointing.budget = budget;
  return c;
}

TEST(KeepPlan, WhatWaitsInHostMemoryIsPlannedToTheByteAndNumbersStayTheSame) {
  for (RunSetup s : setups()) {
    if (s.plan.order == AccumulationOrder::LayerMajor) continue;  // refused
    s.model.layers = 5;
    const Model model = make_model(s.model);
    const RunResult none = train(s);
    const std::int64_t least_here = range_of(s).least;
    for (const double speed : {1e8, 1e12}) {
      const CostModel costs = copying_at(speed);
      const KeepPlan all = explore_keep_plans(moving(s, 0), model, s.world, costs);
      const std::int64_t least = all.frontier.front().bytes, most = all.frontier.back().bytes;
      EXPECT_LT(least, least_here) << "inputs can wait in host memory, too";
      for (const int part : {0, 1, 2}) {
        const KeepPlan plan = make_keep_plan(moving(s, least + (most - least) * part / 4), model, s.world, costs);
        const KeepPlan::Point& point = plan.frontier[plan.chosen];
        const RunResult r = train(under(s, plan));
        EXPECT_EQ(r.peak[index(Tag::Activations)], point.bytes) << s.model.type << " part " << part;
        EXPECT_EQ(r.peak[index(Tag::Host)], point.host) << s.model.type << " part " << part;
        EXPECT_EQ(r.losses, none.losses);
        EXPECT_TRUE(r.gradients == none.gradients) << s.model.type << " part " << part;
        EXPECT_TRUE(differences(none.collectives.back(), r.collectives.back()).empty());
      }
    }
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

TEST(KeepPlan, AsMuchAsNoneNeedsKeepsWhatNoneKeeps) {
  RunSetup s;
  s.policy = {.policy = "none"};
  const RunResult none = train(s);
  EXPECT_EQ(range_of(s).most, none.peak[index(Tag::Activations)]);
  const KeepPlan plan = plan_within(s, none.peak[index(Tag::Activations)]);
  EXPECT_LE(train(under(s, plan)).recomputed_flops, none.recomputed_flops);
}

TEST(KeepPlan, MoreMemoryIsSpentOnSlotsWhenGathersAreDear) {
  const CostModel dear = CostModel::from_json(
      R"({"format": 1, "machine": "", "threads": 1, "ranks": 2, "limits": {"flops": 1e12, "bytes": 1e12},
          "seconds_a_wire_byte": 1e-6, "overhead_an_operation": 0, "operations": []})");
  for (const DType compute : {DType::F32, DType::BF16}) {
    RunSetup s;
    s.compute = compute;
    s.plan.micro_batches = 4;
    RunSetup none = s;
    none.plan.slots = 4;
    Config c = config_of(s);
    c.activation_checkpointing.budget = 0;
    c.sharding.resident_slots = 0;
    c.memory.limit = train(none).peak_total;
    const KeepPlan plan = make_keep_plan(c, make_model(s.model), s.world, dear);
    EXPECT_EQ(plan.slots, 4) << name_of(compute);
    EXPECT_GE(plan.frontier[plan.chosen].everything, s.model.layers - 1)
        << name_of(compute) << ": a slot is not dearer";
    EXPECT_EQ(make_keep_plan(c, make_model(s.model), s.world, kCosts).slots, 1);  // free: not worth a byte
  }
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
