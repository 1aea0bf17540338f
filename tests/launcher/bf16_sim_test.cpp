// Training with parameters and activations in bf16: half the bytes where they are, fp32 where small numbers are added
// up, the same bits whatever is recomputed, and the course of an fp32 run.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/launcher/expected_volume.h"
#include "tests/launcher/training_run.h"

namespace regather::testing {
namespace {

RunSetup setup(const std::string& type = "gpt2") {
  RunSetup s = setup_of(type);
  s.compute = DType::BF16;
  return s;
}

std::vector<PolicyOptions> policies_to_compare() {
  std::vector<PolicyOptions> all;
  for (const Policy& policy : policies())
    if (policy.name != "none")
      all.push_back({.policy = std::string(policy.name),
                     .layers = {1, 3},
                     .planned = {drop_all(), keep_only({"mid", "mlp.up"}), keep_all(), keep_only({"attn.core"})}});
  all.push_back({.policy = "selective", .keep = {{.keep = {"qkv", "attention_core", "mlp"}}}, .order = Order::Ahead});
  all.push_back({.policy = "full", .offload = {.names = {"all"}}});
  return all;
}

TEST(Bf16, EveryPolicyGivesTheSameBits) {
  for (const char* type : {"gpt2", "llama"})
    for (const Strategy strategy : {Strategy::Full, Strategy::Gradients, Strategy::None}) {
      RunSetup s = setup(type);
      s.strategy = strategy;
      s.model.dropout = 0.1F;
      s.plan.micro_batches = 2;
      s.audit = 1;
      const RunResult reference = train(s);
      for (const PolicyOptions& policy : policies_to_compare()) {
        s.policy = policy;
        const RunResult r = train(s);
        EXPECT_EQ(r.losses, reference.losses) << type << " " << policy.policy;
        EXPECT_EQ(r.norms, reference.norms) << type << " " << policy.policy;
        EXPECT_TRUE(r.gradients == reference.gradients) << type << " " << policy.policy;
        EXPECT_TRUE(r.parameters == reference.parameters) << type << " " << policy.policy;
      }
    }
}

TEST(Bf16, AdaptersGiveTheSameBitsUnderEveryPolicy) {
  for (const char* type : {"gpt2", "llama"}) {
    RunSetup s = setup(type);
    s.model.lora = {.rank = 3, .targets = {"*"}};
    const RunResult reference = train(s);
    for (const char* policy : {"full", "segments", "selective"}) {
      s.policy = {.policy = policy};
      EXPECT_TRUE(train(s).gradients == reference.gradients) << type << " " << policy;
    }
  }
}

// What is gathered is bf16 and nothing else is; so many gathers as in fp32, of half the bytes, and the same reductions.
TEST(Bf16, GathersHalfTheBytesAndReducesInFp32) {
  for (const int world : {2, 3})
    for (const char* policy : {"none", "full", "segments"})
      for (const Strategy strategy : {Strategy::Full, Strategy::Gradients, Strategy::Optimizer, Strategy::None}) {
        RunSetup s = setup();
        s.world = world;
        s.steps = 1;
        s.policy = {.policy = policy, .segments = 2};
        s.strategy = strategy;
        s.plan.micro_batches = 2;
        const Ledger::Entries bf16 = train(s).collectives[0];
        s.compute = DType::F32;
        const Ledger::Entries fp32 = train(s).collectives[0];
        ASSERT_EQ(bf16.size(), fp32.size());
        for (const auto& [key_in_fp32, counts] : fp32) {
          LedgerKey key = key_in_fp32;
          LedgerCounts expected = counts;
          if (key.collective == Collective::AllGather) {
            key.dtype = DType::BF16;
            expected.wire_bytes /= 2;
            expected.logical_bytes /= 2;
          }
          ASSERT_TRUE(bf16.contains(key)) << key.unit;
          EXPECT_EQ(bf16.at(key).count, expected.count) << key.unit;
          EXPECT_EQ(bf16.at(key).wire_bytes, expected.wire_bytes) << key.unit;
          EXPECT_EQ(bf16.at(key).logical_bytes, expected.logical_bytes) << key.unit;
        }
        if (strategy != Strategy::Full) continue;
        const UnitSizes sizes(s.model, world);
        const std::int64_t gathers = s.policy.policy == "segments" ? segment_gathers(4, 2, s.plan.slots, 2, 2)
                                                                   : batch_major_gathers(4, 2, s.plan.slots);
        EXPECT_EQ(total(bf16, Collective::AllGather, "block").wire_bytes,
                  gathers * (world - 1) * sizes.block_shard * 2);
        EXPECT_EQ(total(bf16, Collective::ReduceScatter, "block").wire_bytes,
                  4 * 2 * (world - 1) * sizes.block_shard * 4);
      }
}

// As in memory_sim_test.cpp: of a token, at the end of the last forward. Only attention's log-sum-exp is fp32.
TEST(Bf16, ActivationsTakeHalfTheBytes) {
  RunSetup s = setup();
  const std::int64_t C = s.model.hidden, F = 4 * C, H = s.model.heads, tokens = s.micro_batch * s.sequence;
  const std::int64_t costly = 2 * (3 * C + C + C + F) + 4 * H, beside = 2 * (F + C);
  for (const auto& [policy, sets] : {std::pair("none", 4), std::pair("full", 1)}) {
    s.policy.policy = policy;
    EXPECT_EQ(train(s).peak[index(Tag::Activations)], tokens * (4 * 2 * C + sets * costly + beside)) << policy;
  }
  s.policy = {.policy = "full", .offload = {.names = {"all"}}};
  EXPECT_EQ(train(s).peak[index(Tag::Host)], tokens * 3 * 2 * C);
}

TEST(Bf16, ParametersAreGatheredIntoHalfTheRoomAndUpdatedInFp32) {
  RunSetup s = setup();
  s.plan.slots = 2;
  const RunResult r = train(s);
  s.compute = DType::F32;
  const RunResult fp32 = train(s);
  EXPECT_EQ(2 * r.peak[index(Tag::Gathered)], fp32.peak[index(Tag::Gathered)]);
  for (const Tag tag : {Tag::Parameters, Tag::Gradients, Tag::Optimizer})
    EXPECT_EQ(r.peak[index(tag)], fp32.peak[index(tag)]) << name_of(tag);
}

TEST(Bf16, ARunWithoutStoragePredictsEveryAllocation) {
  for (const char* type : {"gpt2", "llama"})
    for (const Strategy strategy : {Strategy::Full, Strategy::Gradients, Strategy::None})
      for (const int rank : {0, 8}) {
        RunSetup s = setup(type);
        s.policy = {.policy = "selective", .keep = {{.keep = {"qkv", "mlp"}}}};
        s.strategy = strategy;
        s.plan.micro_batches = 2;
        s.model.lora.rank = rank;
        const RunResult real = train(s);
        s.mode = Allocator::Mode::Meta;
        RunResult predicted;
        std::mutex mutex;
        run_rank(s, make_model(s.model), *make_dry_communicator(0, s.world), predicted, mutex);
        EXPECT_EQ(predicted.peak_total, real.peak_total) << type;
        EXPECT_TRUE(predicted.events == real.events) << type;
        EXPECT_TRUE(differences(predicted.collectives[1], real.collectives[1]).empty()) << type;
      }
}

// The same weights, batches and masks; only roundings differ. Measured: see docs/numerics.md.
TEST(Bf16, FollowsTheLossesOfAnFp32Run) {
  for (const char* type : {"gpt2", "llama"}) {
    RunSetup s = setup(type);
    s.model.init_std = 0.02F;
    s.model.dropout = 0.1F;
    s.steps = 30;
    s.lr = 2e-3;
    s.same_batch = true;
    const std::vector<double> bf16 = train(s).losses;
    s.compute = DType::F32;
    const std::vector<double> fp32 = train(s).losses;
    double worst = 0;
    for (std::size_t i = 0; i < fp32.size(); ++i) worst = std::max(worst, std::abs(bf16[i] / fp32[i] - 1));
    EXPECT_LT(fp32.back(), 0.9 * fp32.front()) << type << ": nothing was learned";
    EXPECT_NE(bf16, fp32);
    RecordProperty(std::string(type), fmt::format("{}", worst));
    EXPECT_LT(worst, 0.02) << type;
  }
}

// A replica that is rounded on its way out of a sharded update, or out of one that every rank makes, is the same.
TEST(Bf16, EveryStrategyTrainsAlike) {
  RunSetup s = setup();
  s.steps = 3;
  const RunResult reference = train(s);
  for (const Strategy strategy : {Strategy::Gradients, Strategy::Optimizer, Strategy::None}) {
    s.strategy = strategy;
    const RunResult r = train(s);
    for (std::size_t i = 0; i < r.losses.size(); ++i) EXPECT_NEAR(r.losses[i], reference.losses[i], 2e-6 * 10);
  }
}

}  // namespace
}  // namespace regather::testing
