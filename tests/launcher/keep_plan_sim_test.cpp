// Plans of real steps: what was planned is what the allocator counts, to the byte, and numbers are those of policy
// none.
#include <gtest/gtest.h>

#include "tests/launcher/keep_plans.h"

namespace regather::testing {
namespace {

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

TEST(KeepPlan, WhatWaitsInHostMemoryIsPlannedToTheByteAndNumbersStayTheSame) {
  for (RunSetup s : setups()) {
    if (s.plan.order == AccumulationOrder::LayerMajor) continue;  // refused
    s.model.layers = 5;
    const Model model = make_model(s.model);
    const RunResult none = train(s);
    const CostModel costs = copying_at(s.model.type == "llama" ? 1e8 : 1e12);
    const KeepPlan all = explore_keep_plans(moving(s, 0), model, s.world, costs);
    const std::int64_t least = all.frontier.front().bytes, most = all.frontier.back().bytes;
    EXPECT_LT(least, range_of(s).least) << "inputs can wait in host memory, too";
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

}  // namespace
}  // namespace regather::testing
