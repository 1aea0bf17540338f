#include "ckpt/policy.h"

#include <gtest/gtest.h>

#include <set>

namespace regather {
namespace {

using Layers = std::vector<int>;

CheckpointPlan every_n(int n, int blocks) {
  return make_checkpoint_plan({.policy = "every_n_layers", .every_n_layers = n}, blocks);
}
SegmentStarts segments(int n, int blocks) {
  return make_checkpoint_plan({.policy = "segments", .segments = n}, blocks).segments;
}

std::string refusal(const PolicyOptions& options, int blocks) {
  try {
    make_checkpoint_plan(options, blocks);
  } catch (const UsageError& e) {
    EXPECT_EQ(e.code(), ExitCode::Usage);
    return e.what();
  }
  return "not refused";
}

// The blocks that drop what no mark keeps, from the plan of each block itself.
Layers checkpointed(const CheckpointPlan& plan) {
  Layers out;
  for (std::size_t b = 0; b < plan.blocks.size(); ++b)
    if (plan.blocks[b].unmarked == Placement::Drop) out.push_back(static_cast<int>(b));
  return out;
}

// Those that keep nothing but their input, of a plan without marks.
Layers droppers(const CheckpointPlan& plan) {
  for (const SavePlan& block : plan.blocks) EXPECT_TRUE(block.marks.empty());
  return checkpointed(plan);
}

std::vector<Marks> same_marks(int blocks) {
  return std::vector<Marks>(static_cast<std::size_t>(blocks), Marks{"attn.qkv", "attn.core", "attn.out", "mlp.up"});
}
std::vector<Marks> kept(const std::vector<KeepRule>& keep, int blocks) {
  const CheckpointPlan plan =
      make_checkpoint_plan({.policy = "selective", .keep = keep, .marks = same_marks(blocks)}, blocks);
  EXPECT_EQ(checkpointed(plan).size(), static_cast<std::size_t>(blocks));
  std::vector<Marks> out;
  for (const SavePlan& block : plan.blocks) out.push_back(block.placed(Placement::Keep));
  return out;
}

TEST(Policy, NoneKeepsAndFullDrops) {
  const CheckpointPlan none = make_checkpoint_plan({.policy = "none"}, 4),
                       full = make_checkpoint_plan({.policy = "full"}, 4);
  EXPECT_EQ(droppers(none), Layers{});
  EXPECT_EQ(droppers(full), (Layers{0, 1, 2, 3}));
  EXPECT_TRUE(none.segments.empty() && full.segments.empty());
}

TEST(Policy, EveryNLayersBeginsWithTheFirst) {  // as in Transformers: 0, n, 2n, ...
  EXPECT_EQ(droppers(every_n(1, 4)), (Layers{0, 1, 2, 3}));
  EXPECT_EQ(droppers(every_n(2, 4)), (Layers{0, 2}));
  EXPECT_EQ(droppers(every_n(2, 5)), (Layers{0, 2, 4}));
  EXPECT_EQ(droppers(every_n(3, 8)), (Layers{0, 3, 6}));
  EXPECT_EQ(droppers(every_n(4, 4)), (Layers{0}));
  EXPECT_EQ(droppers(every_n(100, 4)), (Layers{0}));
}

TEST(Policy, EveryNLayersRefusesWhatIsNoDistance) {
  for (const int n : {0, -1}) {
    const std::string text = refusal({.policy = "every_n_layers", .every_n_layers = n}, 4);
    EXPECT_EQ(text,
              "activation_checkpointing.every_n_layers: " + std::to_string(n) + " is out of range; allowed: 1 or more");
  }
}

TEST(Policy, TwoModelsOfOneProcessGetTheSameLayers) { EXPECT_EQ(droppers(every_n(3, 7)), droppers(every_n(3, 7))); }

TEST(Policy, LayersAreTheListedOnesInAnyOrder) {
  EXPECT_EQ(droppers(make_checkpoint_plan({.policy = "layers", .layers = {3, 0}}, 4)), (Layers{0, 3}));
  EXPECT_EQ(droppers(make_checkpoint_plan({.policy = "layers", .layers = {}}, 4)), Layers{});
  EXPECT_EQ(refusal({.policy = "layers", .layers = {0, 4}}, 4),
            "activation_checkpointing.layers: 4 is out of range; allowed: 0 to 3");
  EXPECT_EQ(refusal({.policy = "layers", .layers = {-1}}, 4),
            "activation_checkpointing.layers: -1 is out of range; allowed: 0 to 3");
  EXPECT_EQ(refusal({.policy = "layers", .layers = {1, 0, 1}}, 4),
            "activation_checkpointing.layers: 1 is listed twice");
}

TEST(Policy, SegmentsDifferByOneBlockAtMostAndCoverAll) {
  for (int blocks = 1; blocks <= 12; ++blocks)
    for (int n = 1; n <= blocks; ++n) {
      const SegmentStarts starts = segments(n, blocks);
      ASSERT_EQ(static_cast<int>(starts.size()), n);
      EXPECT_EQ(starts[0], 0);
      std::set<int> sizes;
      for (std::size_t s = 0; s < starts.size(); ++s)
        sizes.insert((s + 1 < starts.size() ? starts[s + 1] : blocks) - starts[s]);
      EXPECT_GE(*sizes.begin(), 1);
      EXPECT_LE(*sizes.rbegin() - *sizes.begin(), 1);
    }
  EXPECT_EQ(segments(3, 8), (SegmentStarts{0, 3, 6}));
  EXPECT_EQ(droppers(make_checkpoint_plan({.policy = "segments", .segments = 3}, 4)), (Layers{0, 1, 2, 3}));
}

TEST(Policy, SegmentsChooseTheRootOfTheBlocksByThemselves) {
  for (const auto& [blocks, expected] : std::vector<std::pair<int, std::size_t>>{
           {1, 1}, {2, 1}, {3, 2}, {4, 2}, {6, 2}, {7, 3}, {9, 3}, {12, 3}, {13, 4}, {48, 7}})
    EXPECT_EQ(segments(0, blocks).size(), expected) << blocks;
}

TEST(Policy, SegmentsRefuseWhatCannotBeCut) {
  EXPECT_EQ(refusal({.policy = "segments", .segments = 5}, 4),
            "activation_checkpointing.segments: 5 is out of range; allowed: 0 (automatic) to 4");
  EXPECT_EQ(refusal({.policy = "segments", .segments = -1}, 4),
            "activation_checkpointing.segments: -1 is out of range; allowed: 0 (automatic) to 4");
}

TEST(Policy, SelectiveKeepsTheSameMarksInEveryBlock) {
  EXPECT_EQ(kept({{.keep = {"attn.out", "qkv"}}}, 2), (std::vector<Marks>(2, Marks{"attn.out", "attn.qkv"})));
  EXPECT_EQ(kept({{.keep = {"attn.*"}}}, 1), (std::vector<Marks>{{"attn.core", "attn.out", "attn.qkv"}}));
}

TEST(Policy, SelectiveTakesOneSetOfMarksABlock) {
  EXPECT_EQ(kept({{.layers = {2, 0}, .keep = {"mlp"}}, {.layers = {1}, .keep = {"core"}}}, 4),
            (std::vector<Marks>{{"mlp.up"}, {"attn.core"}, {"mlp.up"}, {}}));
  EXPECT_EQ(kept({{.keep = {"qkv"}}, {.layers = {1}, .keep = {}}}, 3),
            (std::vector<Marks>{{"attn.qkv"}, {}, {"attn.qkv"}}));
}

TEST(Policy, SelectiveRefusesWhatItCannotPlace) {
  const auto text = [](const std::vector<KeepRule>& keep) {
    return refusal({.policy = "selective", .keep = keep, .marks = same_marks(4)}, 4);
  };
  EXPECT_EQ(text({{.keep = {"attn.outt"}}}),
            "activation_checkpointing.keep: 'attn.outt' matches no mark of this model; allowed: its marks attn.qkv, "
            "attn.core, attn.out, mlp.up, the part of one after its last dot, a pattern with *, or a level (norms, "
            "attention_core, mlp)");
  EXPECT_EQ(text({{.layers = {4}, .keep = {"qkv"}}}),
            "activation_checkpointing.keep: layer 4 is out of range; allowed: 0 to 3");
  EXPECT_EQ(text({{.layers = {1}, .keep = {"qkv"}}, {.layers = {0, 1}, .keep = {"out"}}}),
            "activation_checkpointing.keep: layer 1 is listed twice");
  EXPECT_EQ(text({{.keep = {"qkv"}}, {.keep = {"out"}}}),
            "activation_checkpointing.keep: two entries list no layers; allowed: one, for the layers that no other "
            "entry lists");
}

TEST(Policy, NoneOffloadsWhatItKeepsAndNothingElse) {
  PolicyOptions options{
      .policy = "none", .marks = same_marks(3), .costly = std::vector<Marks>(3, {"attn.qkv", "attn.core", "mlp.up"})};
  options.offload = {.names = {"qkv", "mlp.up"}};
  EXPECT_EQ(make_checkpoint_plan(options, 3).blocks[0].placed(Placement::Offload), (Marks{"attn.qkv", "mlp.up"}));
  options.offload = {.names = {"attn.*"}};
  EXPECT_EQ(make_checkpoint_plan(options, 3).blocks[0].placed(Placement::Offload), (Marks{"attn.core", "attn.qkv"}));
  options.offload = {.names = {"attn.out"}};
  EXPECT_NE(refusal(options, 3).find("keeps no value that 'attn.out' stands for"), std::string::npos);
}

TEST(Policy, AnUnknownOneIsRefusedWithTheKnownOnes) {
  const std::string text = refusal({.policy = "fulll"}, 4);
  EXPECT_NE(text.find("'fulll'"), std::string::npos);
  for (const Policy& p : policies()) EXPECT_NE(text.find(std::string(p.name)), std::string::npos) << p.name;
}

TEST(Policy, EveryPolicyReportsTheLayersItCheckpointsAndTakesAnOrder) {
  for (const Policy& p : policies())
    for (const Order order : {Order::Lazy, Order::Ahead, Order::Eager}) {
      const CheckpointPlan plan = make_checkpoint_plan({.policy = std::string(p.name),
                                                        .marks = same_marks(6),
                                                        .planned = std::vector<SavePlan>(6, drop_all()),
                                                        .order = order},
                                                       6);
      EXPECT_EQ(plan.blocks.size(), 6U) << p.name;
      EXPECT_EQ(plan.checkpointed, checkpointed(plan)) << p.name;
      for (const SavePlan& block : plan.blocks) EXPECT_EQ(block.order, order) << p.name;
    }
}

}  // namespace
}  // namespace regather
