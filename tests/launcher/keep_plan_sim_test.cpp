// Plans of real steps: what was planned is what the allocator counts, to the byte, and numbers are those of policy
// none.
#include <gtest/gtest.h>

#include "tests/launcher/keep_plans.h"
#include "tests/launcher/reruns_by_hand.h"

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

// A block's own names; without any, nothing or all that is costly.
KeptNames kept_by(const RunSetup& s, const SavePlan& plan) {
  KeptNames kept;
  if (plan.marks.empty() && plan.unmarked == Placement::Keep) kept = costly_by_hand(s);
  for (const Placement there : {Placement::Keep, Placement::Offload})
    for (const std::string& name : plan.placed(there)) kept.insert(name);
  return kept;
}
// What ran, against what these sets leave out: operation by operation, and in flops. The last block keeps what is
// costly, whatever its set: its backward comes first.
void expect_reruns(const RunSetup& s, const std::vector<KeptNames>& kept_by_block) {
  Reruns expected;
  const auto tokens = static_cast<double>(s.micro_batch * s.sequence);
  for (int m = 0; m < s.plan.micro_batches; ++m)
    for (std::size_t b = 0; b < kept_by_block.size(); ++b)
      expected.add(s, b + 1 < kept_by_block.size() ? kept_by_block[b] : costly_by_hand(s), tokens);
  const RunResult r = train(s);
  EXPECT_EQ(r.recomputed_flops, expected.flops);
  EXPECT_EQ(r.reruns, expected.operations);
}

std::vector<RunSetup> small_ones() {
  std::vector<RunSetup> all;
  for (const char* type : {"gpt2", "llama"})
    for (const int world : {1, 2}) {
      RunSetup s = setup_of(type);
      if (s.model.type == "llama") s.model.ffn_hidden = 48;
      s.world = world;
      s.steps = 1;
      all.push_back(s);
    }
  return all;
}

TEST(Recompute, OfAPlanWithinABudgetIsWhatItsKeepSetsLeaveOut) {
  for (RunSetup s : small_ones()) {
    s.model.layers = 3;
    s.plan.micro_batches = s.world;
    const Range range = range_of(s);
    std::set<std::vector<KeptNames>> seen;
    const auto expect = [&](const KeepPlan& plan) {
      std::vector<KeptNames> kept;
      for (const SavePlan& of_block : plan.blocks) kept.push_back(kept_by(s, of_block));
      expect_reruns(under(s, plan), kept);
      seen.insert(kept);
    };
    for (const int part : {0, 4, 7, 10}) {
      SCOPED_TRACE(fmt::format("{}, {} ranks, part {}", s.model.type, s.world, part));
      expect(plan_within(s, range.least + (range.most - range.least) * part / 10));
    }
    EXPECT_EQ(seen.size(), 4U) << "budgets that tell nothing apart";
    if (s.world == 1) continue;
    SCOPED_TRACE(s.model.type + ", some of it in host memory");
    const KeepPlan plan = make_keep_plan(moving(s, range.least), make_model(s.model), s.world, copying_at(1e12));
    EXPECT_GT(plan.frontier[plan.chosen].host, 0);
    expect(plan);
  }
}

TEST(Recompute, OfKeptNamesIsWhatTheyLeaveOutInHostMemoryOrNot) {
  for (RunSetup s : small_ones())
    for (const std::vector<std::string>& names :
         {std::vector<std::string>{"attn.qkv"}, {"attn.core", "mlp.up"}, {"attn.out", "mlp.norm"}, {"mid", "mlp.act"}})
      for (const bool moves : {false, true}) {
        SCOPED_TRACE(fmt::format("{}, {} ranks, {} and another, {}", s.model.type, s.world, names[0], moves));
        s.policy = {.policy = "selective", .keep = {{.layers = {0, 2}, .keep = names}}};
        if (moves) s.policy.offload.names = {"marks"};
        const KeptNames kept(names.begin(), names.end());
        expect_reruns(s, {kept, {}, kept, {}});
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
