// Low-rank adapters in whole steps: what learns when, what stays as it was, what a rank holds, what is communicated,
// and that policies, ranks and strategies change nothing. Closed forms are written here from the models' definitions.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <thread>

#include "launcher/adapter_file.h"
#include "tests/launcher/expected_volume.h"
#include "tests/launcher/training_run.h"

namespace regather::testing {
namespace {

class Lora : public ::testing::TestWithParam<std::string> {
 protected:
  RunSetup setup(std::vector<std::string> targets = {"*"}) const {
    RunSetup s = setup_of(GetParam());
    s.model.lora = {.rank = 4, .alpha = 8, .targets = std::move(targets)};
    s.world = 1;
    return s;
  }
};

bool all_zero(const std::vector<float>& values) {
  return std::ranges::all_of(values, [](float v) { return v == 0.0F; });
}

// Every parameter's whole values after a run, those that are not trained too.
std::map<std::string, std::vector<float>> train_and_gather(const RunSetup& s) {
  std::map<std::string, std::vector<float>> all;
  const Model model = make_model(s.model);
  run_ranks(s.world, {}, [&](Communicator& comm) {
    CpuDevice device;
    Trainer trainer(model, device, comm, trainer_options(s));
    for (int step = 0; step < s.steps; ++step) {
      const Batch batch = make_batch(device, s, comm.rank(), comm.size(), step, 0);
      trainer.step({&batch, 1});
    }
    for (auto& unit : trainer.stack().units()) {
      const auto lease = unit->acquire(Pass::Save);
      for (std::size_t i = 0; i < unit->table().size(); ++i) {
        const ParamInfo& info = unit->table()[i];
        const auto* values = static_cast<const float*>(unit->data(static_cast<int>(i)));
        if (comm.rank() == 0) all[info.name] = {values, values + info.shape.numel()};
      }
    }
  });
  return all;
}

TEST_P(Lora, InTheFirstStepOnlyTheUpperHalvesLearnAndThenBothInEveryBlock) {
  for (const int world : {1, 2})
    for (const char* policy : {"none", "full"}) {
      RunSetup s = setup();
      s.world = world;
      s.policy.policy = policy;
      for (s.steps = 1; s.steps <= 2; ++s.steps) {
        const RunResult r = train(s);
        const std::size_t layers = s.model.type == "llama" ? 7 : 4;
        ASSERT_EQ(r.gradients.size(), 2 * layers * static_cast<std::size_t>(s.model.layers));
        for (const auto& [name, gradient] : r.gradients) {
          const bool down = name.ends_with("lora_A.weight");
          ASSERT_TRUE(down || name.ends_with("lora_B.weight")) << name;
          EXPECT_EQ(all_zero(gradient), down && s.steps == 1) << name << ", " << policy << ", step " << s.steps;
        }
      }
    }
}

TEST_P(Lora, ShardedAndRecomputedTrainingEqualsTheWholeModelOnOneRank) {
  RunSetup s = setup({GetParam() == "llama" ? "attn.q" : "attn.qkv", GetParam() == "llama" ? "attn.v" : "mlp.up"});
  s.optimizer.type = OptimizerOptions::Type::Sgd;
  s.steps = 3;
  s.micro_batch = 4;
  s.strategy = Strategy::None;
  const RunResult reference = train(s);
  s.strategy = Strategy::Full;
  s.world = 2;
  s.micro_batch = 2;
  RunResult kept;
  for (const char* policy : {"none", "full"}) {
    s.policy.policy = policy;
    const RunResult r = train(s);
    for (std::size_t i = 0; i < r.losses.size(); ++i)
      EXPECT_NEAR(r.losses[i], reference.losses[i], 2e-6 * reference.losses[i]);
    ASSERT_EQ(r.gradients.size(), reference.gradients.size());
    for (const auto& [name, gradient] : reference.gradients) {
      float largest = 0, difference = 0;
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        largest = std::max(largest, std::abs(gradient[i]));
        difference = std::max(difference, std::abs(gradient[i] - r.gradients.at(name)[i]));
      }
      EXPECT_LE(difference, 1e-5F * largest + 1e-10F) << name;
    }
    if (s.policy.policy == "none") kept = r;
    EXPECT_TRUE(r.gradients == kept.gradients);
  }
}

TEST_P(Lora, BeginsWithTheModelAsItIsWithoutAdapters) {
  RunSetup s = setup();
  s.steps = 1;
  const RunResult adapted = train(s);
  s.model.lora.rank = 0;
  EXPECT_EQ(adapted.losses, train(s).losses);
}

TEST_P(Lora, FrozenParametersStayAsTheyWereToTheBit) {
  for (const Strategy strategy : {Strategy::Full, Strategy::None}) {
    RunSetup s = setup();
    s.world = 2;
    s.steps = 3;
    s.strategy = strategy;
    s.policy.policy = "full";
    const auto after = train_and_gather(s);
    const Model model = make_model(s.model);
    int frozen = 0;
    for (const UnitSpec& unit : model.units)
      for (const ParamInfo& info : unit.params) {
        std::vector<float> start(static_cast<std::size_t>(info.shape.numel()));
        initialize(info, s.seed, 0, info.shape.numel(), start.data());
        EXPECT_EQ(after.at(info.name) == start, !info.trainable) << info.name;
        frozen += !info.trainable;
      }
    EXPECT_GT(frozen, 30);
  }
}

// With dropout, and with copies that are slower than the computation.
TEST_P(Lora, OffloadedValuesGiveTheSameBitsOnOneTwoAndFourRanks) {
  std::vector<PolicyOptions> all{
      {.policy = "none", .offload = {.names = {"all"}}},
      {.policy = "full", .offload = {.names = {"all"}, .depth = 2}},
      {.policy = "segments", .segments = 2, .offload = {.names = {"all"}}},
      {.policy = "selective", .keep = {{.keep = {"mid", "attn.*"}}}, .offload = {.names = {"input", "mid"}}},
      {.policy = "budget",
       .planned = {drop_all(),
                   {.unmarked = Placement::Drop, .inputs = Placement::Offload, .marks = {{"mid", Placement::Offload}}},
                   keep_costly(),
                   keep_all()}}};
  for (const int world : {1, 2, 4}) {
    RunSetup s = setup({"attn.*", "mlp.*"});
    s.model.dropout = 0.1F;
    s.world = world;
    s.plan.micro_batches = 2;
    s.policy = {.policy = "none"};
    const RunResult reference = train(s);
    s.prepare = [](CpuDevice& device) {
      device.before_copy = [copies = 0](Stream, std::int64_t) mutable {
        if (++copies % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      };
    };
    for (const PolicyOptions& policy : all) {
      s.policy = policy;
      const RunResult r = train(s);
      EXPECT_EQ(r.losses, reference.losses) << policy.policy << " world " << world;
      EXPECT_TRUE(r.gradients == reference.gradients) << policy.policy << " world " << world;
      EXPECT_TRUE(r.parameters == reference.parameters) << policy.policy << " world " << world;
      if (policy.policy != "segments") {  // whose replays gather again
        EXPECT_TRUE(differences(r.collectives.back(), reference.collectives.back()).empty()) << policy.policy;
      }
    }
  }
}

TEST_P(Lora, EveryPolicyStrategyAndOrderGivesTheSameBits) {
  std::vector<PolicyOptions> all{{.policy = "full", .order = Order::Ahead}, {.policy = "full", .order = Order::Eager}};
  for (const Policy& policy : policies())
    if (policy.name != "none")
      all.push_back({.policy = std::string(policy.name),
                     .layers = {0, 2},
                     .planned = {drop_all(), keep_only({"mid", "mlp.up"}), keep_all(), keep_only({"attn.core"})}});
  for (const Strategy strategy : {Strategy::Full, Strategy::Gradients, Strategy::Optimizer, Strategy::None})
    for (const auto order : {AccumulationOrder::BatchMajor, AccumulationOrder::LayerMajor})
      for (const auto reduce : {ReduceWhen::EachMicroBatch, ReduceWhen::Once}) {
        // Reduced once, and in layer-major order: of one strategy, since the plan does not depend on it.
        if ((order == AccumulationOrder::LayerMajor || reduce == ReduceWhen::Once) && strategy != Strategy::Full)
          continue;
        if (order == AccumulationOrder::LayerMajor && reduce == ReduceWhen::Once) continue;  // the same plan
        RunSetup s = setup({"attn.*"});
        s.model.dropout = 0.1F;
        s.world = 2;
        s.strategy = strategy;
        s.plan.order = order;
        s.plan.reduce = reduce;
        s.plan.micro_batches = 2;
        const RunResult reference = train(s);
        for (const PolicyOptions& policy : all) {
          s.policy = policy;
          const RunResult r = train(s);
          EXPECT_EQ(r.losses, reference.losses) << policy.policy << " strategy " << static_cast<int>(strategy);
          EXPECT_EQ(r.norms, reference.norms);
          EXPECT_TRUE(r.gradients == reference.gradients) << policy.policy;
          EXPECT_TRUE(r.parameters == reference.parameters) << policy.policy;
        }
      }
}

TEST_P(Lora, ARateOfZeroTeachesNothingAndIsNoError) {
  RunSetup s = setup();
  s.lr = 0;
  s.steps = 3;
  EXPECT_EQ(train(s).losses.size(), 3U);
}

TEST_P(Lora, AHalfThatNeverLearnsEndsTheRun) {
  RunSetup s = setup();
  s.model.frozen = {"*.lora_B.weight"};  // at zero for ever, so that no A has a gradient
  try {
    train(s);
    FAIL() << "accepted";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("lora_A.weight was zero in every element"), std::string::npos) << e.what();
  }
}

// Of a GPT-2 whose adapters are on `targets`: elements.
struct Sizes {
  explicit Sizes(const RunSetup& s) {
    const std::int64_t C = s.model.hidden, F = 4 * C, r = s.model.lora.rank, W = s.world;
    share = [W](std::int64_t n) { return (n + W - 1) / W; };
    block = 12 * C * C + 13 * C;
    table = s.model.vocab * C;
    positions = s.model.max_sequence * C;
    head = 2 * C;
    const std::map<std::string, std::int64_t> of{
        {"attn.qkv", r * (C + 3 * C)}, {"attn.proj", r * 2 * C}, {"mlp.up", r * (C + F)}, {"mlp.down", r * (F + C)}};
    for (const std::string& target : s.model.lora.targets) adapters += of.at(target);
  }
  std::function<std::int64_t(std::int64_t)> share;
  std::int64_t block, table, positions, head, adapters = 0;  // adapters: of a block
};

RunSetup gpt2(int world, std::vector<std::string> targets = {"attn.qkv", "attn.proj"}) {
  RunSetup s;
  s.model.lora = {.rank = 3, .alpha = 6, .targets = std::move(targets)};
  s.world = world;
  return s;
}

TEST(LoraVolume, OnlyAdaptersAreReducedAndAGatherBringsBothInOneEntry) {
  for (const int world : {2, 3, 4})
    for (const int micro : {1, 2})
      for (const char* policy : {"none", "full"}) {
        RunSetup s = gpt2(world);
        s.policy.policy = policy;
        s.plan.micro_batches = micro;
        s.micro_batch = 1;
        s.steps = 1;
        const RunResult r = train(s);
        const Sizes n(s);
        const std::int64_t L = s.model.layers, hops = world - 1, gathers = batch_major_gathers(L, micro, 2);
        const auto gathered = total(r.collectives[0], Collective::AllGather, "block");
        const auto reduced = total(r.collectives[0], Collective::ReduceScatter, "block");
        EXPECT_EQ(gathered.count, gathers);
        EXPECT_EQ(gathered.wire_bytes, gathers * hops * 4 * (n.share(n.block) + n.share(n.adapters)));
        EXPECT_EQ(reduced.count, L * micro);
        EXPECT_EQ(reduced.wire_bytes, L * micro * hops * 4 * n.share(n.adapters));
        for (const char* unit : {"wte", "wpe", "head"}) {
          EXPECT_EQ(total(r.collectives[0], Collective::ReduceScatter, unit).count, 0) << unit;
          EXPECT_EQ(total(r.collectives[0], Collective::AllGather, unit).count, micro * (unit[1] == 't' ? 2 : 1));
        }
      }
}

TEST(LoraVolume, ReplicasRefreshTheirAdaptersOnly) {
  for (const Strategy strategy : {Strategy::Gradients, Strategy::Optimizer, Strategy::None}) {
    RunSetup s = gpt2(3);
    s.strategy = strategy;
    s.steps = 1;
    const RunResult r = train(s);
    const std::int64_t bytes = s.model.layers * 2 * 4 * Sizes(s).share(Sizes(s).adapters);
    const bool all_reduced = strategy == Strategy::None;
    EXPECT_EQ(total(r.collectives[0], Collective::AllGather, "block").wire_bytes, all_reduced ? 0 : bytes);
    EXPECT_EQ(total(r.collectives[0], Collective::ReduceScatter, "block").wire_bytes, all_reduced ? 0 : bytes);
    EXPECT_EQ(total(r.collectives[0], Collective::AllReduce, "block").wire_bytes, all_reduced ? 2 * bytes : 0);
    EXPECT_EQ(total(r.collectives[0], Collective::AllGather, "wte").count, 0);
  }
}

// A run without storage, as the forecast makes it.
RunResult dry(RunSetup s) {
  s.mode = Allocator::Mode::Meta;
  RunResult r;
  std::mutex mutex;
  run_rank(s, make_model(s.model), *make_dry_communicator(0, s.world), r, mutex);
  return r;
}

TEST(LoraMemory, GradientsAndOptimizerAreThoseOfTheAdaptersWhateverTheSizeOfTheBase) {
  for (const int world : {2, 4})
    for (const std::int64_t hidden : {256, 512}) {
      RunSetup s;
      s.model = {.type = "llama",
                 .layers = 4,
                 .hidden = hidden,
                 .heads = 8,
                 .kv_heads = 4,
                 .vocab = 257,
                 .max_sequence = 16,
                 .tie_embeddings = false,
                 .lora = {.rank = 8, .targets = {"attn.q", "attn.v"}}};
      s.world = world;
      s.policy.policy = "full";
      const std::int64_t C = hidden, kv = C / 2, F = (8 * C / 3 + 63) / 64 * 64, W = world;
      const auto share = [&](std::int64_t n) { return (n + W - 1) / W; };
      const std::int64_t adapters = 8 * ((C + C) + (C + kv)), block = 2 * C + (C + 2 * kv) * C + C * C + 3 * F * C;
      const RunResult r = dry(s);
      EXPECT_EQ(r.before[index(Tag::Gradients)], 4 * share(adapters) * 4);
      EXPECT_EQ(r.before[index(Tag::Optimizer)], 4 * share(adapters) * 8);
      EXPECT_EQ(r.before[index(Tag::Parameters)],
                4 * (4 * (share(block) + share(adapters)) + share(257 * C) + share(257 * C + C)));
      EXPECT_EQ(r.peak[index(Tag::Gradients)], 4 * share(adapters) * 4) << "no gradient of the base, not for a moment";
    }
}

// Values of a token that a frozen block's backward reads besides the block's input: q k v, attention's output and its
// log-sum-exp, the middle of the residual (read by the second norm) and the MLP before its activation; and the input of
// every linear layer that has an adapter. Nothing before the first block is trained: there, what comes before the first
// adapter has no gradient and saves nothing.
TEST(LoraMemory, AFrozenLinearLayerSavesNothingAndOneWithAnAdapterItsInput) {
  const RunSetup sizes = gpt2(2);
  const std::int64_t C = sizes.model.hidden, F = 4 * C, H = sizes.model.heads, L = sizes.model.layers;
  const std::int64_t qkv_core = 3 * C + C + H, mid = C;
  struct Case {
    std::vector<std::string> targets;
    std::int64_t first, again;  // what the first block keeps under none; what a rerun leaves for backward
  };
  const std::int64_t costly = qkv_core + mid + F;
  // Where nothing before it is trained, an operation saves nothing for itself: its output is kept for the adapter, but
  // for the first norm's: the block's input is there.
  const Case cases[] = {
      {{"attn.qkv"}, costly, C + costly},
      {{"attn.qkv", "attn.proj"}, costly, C + costly},  // attention saves its output, too
      {{"attn.proj"}, C + mid + F, costly},
      {{"mlp.up"}, C + F, costly + C},
      {{"mlp.down"}, F, costly + F},
      {{"attn.qkv", "attn.proj", "mlp.up", "mlp.down"}, costly, C + costly + C + F},
  };
  for (const Case& c : cases)
    for (const char* policy : {"none", "full"}) {
      RunSetup s = gpt2(2, c.targets);
      s.policy.policy = policy;
      const bool full = s.policy.policy == "full";
      // Block inputs and sets, and in the last block the activation and what the last linear layer makes of it; or all
      // inputs but one, and everything that a backward reads.
      const std::int64_t forward = L * C + (full ? costly : c.first + (L - 1) * costly) + F + C,
                         backward = full ? (L - 1) * C + c.again : 0;
      EXPECT_EQ(dry(s).peak[index(Tag::Activations)], 4 * s.micro_batch * s.sequence * std::max(forward, backward))
          << policy << " " << c.targets[0];
    }
}

TEST(LoraMemory, TheStepWithoutStoragePredictsEveryAllocation) {
  for (const char* type : {"gpt2", "llama"})
    for (const char* policy : {"none", "full", "segments"})
      for (const Strategy strategy : {Strategy::Full, Strategy::Gradients, Strategy::None}) {
        RunSetup s = gpt2(2, {"attn.qkv", "mlp.*"});
        s.model.type = type;
        s.policy = {.policy = policy, .segments = 2};
        s.strategy = strategy;
        s.plan.micro_batches = 2;
        const RunResult real = train(s), meta = dry(s);
        EXPECT_EQ(meta.peak_total, real.peak_total) << type << " " << policy;
        EXPECT_TRUE(meta.events == real.events) << type << " " << policy;
        EXPECT_TRUE(differences(meta.collectives[1], real.collectives[1]).empty());
      }
}

INSTANTIATE_TEST_SUITE_P(Models, Lora, ::testing::Values("gpt2", "llama"),
                         [](const auto& model) { return model.param; });

}  // namespace
}  // namespace regather::testing
