// What a step holds and what it computes twice, exactly: closed forms of GPT-2, written here from the model's
// definition. A checkpoint that recomputes nothing, or frees nothing, fails.
#include <gtest/gtest.h>

#include "tests/launcher/expected_volume.h"
#include "tests/launcher/training_run.h"

namespace regather::testing {
namespace {

// Values of one block and token in floats, and flops of a token. C channels, F = 4 C, H heads, T tokens a sequence, V
// words.
struct Block {
  explicit Block(const RunSetup& s) {
    C = static_cast<double>(s.model.hidden);
    V = static_cast<double>(s.model.vocab);
    T = static_cast<double>(s.sequence);
    F = 4 * C;
    // What backward reads besides the block's input: both norms, q k v, attention's output and log-sum-exp, the middle
    // of the residual, the MLP before and after its activation.
    saved = C + 3 * C + C + static_cast<double>(s.model.heads) + C + C + F + F;
    const double norm = 8 * C, attention = 4 * C * (T + 1) / 2;
    rerun = norm + 2 * C * 3 * C + attention + 2 * C * C + C + norm + 2 * C * F + 20 * F;
    forward = rerun + 2 * F * C + C;  // the last product and the last residual are never needed again
    roots = C + norm + 2 * C * V;     // positions; the head's norm and product
  }
  double C, F, T, V, saved, rerun, forward, roots;
};

RunSetup setup(const PolicyOptions& policy, int layers = 4) {
  RunSetup s;
  s.model.layers = layers;
  s.policy = policy;
  s.steps = 2;
  return s;
}
double tokens(const RunSetup& s) { return static_cast<double>(s.micro_batch * s.sequence); }

// What a checkpointed block keeps (values of a token that a backward or a rerun reads) and which flops that spares, by
// the names in `keep`.
struct Kept {
  std::vector<std::string> names;
  double values, spared;
};
std::vector<Kept> kept_of_gpt2(const RunSetup& s) {
  const Block b(s);
  const double norm = 8 * b.C, qkv = 6 * b.C * b.C, attention = 2 * b.C * (b.T + 1), projection = 2 * b.C * b.C,
               up = 2 * b.C * b.F, gelu = 20 * b.F, H = static_cast<double>(s.model.heads);
  return {
      {{"attn.out"}, b.C, projection},
      {{"attn.out", "qkv"}, 4 * b.C, projection + qkv},
      {{"attention_core"}, b.C + H, attention},  // with its statistics: else attention would run again for them
      {{"norms"}, 2 * b.C, 2 * norm},
      {{"mlp"}, 2 * b.F, up + gelu},
      {{"mid"}, b.C, projection + b.C},
      {{"mid", "attn.out"}, b.C, projection + b.C},  // nobody reads attn.out where mid is kept
      {{"*"}, b.saved, b.rerun},
  };
}

void expect_activations(const RunSetup& s, double per_token) {
  EXPECT_EQ(train(s).peak[index(Tag::Activations)], static_cast<std::int64_t>(sizeof(float) * per_token * tokens(s)))
      << s.policy.policy;
}

// At the head: block inputs, the head's input, its norm's output and the losses; and the sets of the blocks that kept
// theirs.
void expect_activation_peak(const RunSetup& s, double block_inputs, double head_inputs, double saved_sets) {
  const Block b(s);
  expect_activations(s, block_inputs * b.C + head_inputs * b.C + saved_sets * b.saved + b.C + 1);
}

TEST(ActivationPeak, NoneKeepsEveryBlocksSet) { expect_activation_peak(setup({.policy = "none"}), 4, 1, 4); }
TEST(ActivationPeak, FullKeepsInputsAndOneBlocksSet) { expect_activation_peak(setup({.policy = "full"}), 4, 1, 1); }
TEST(ActivationPeak, EveryNLayersKeepsTheOthersAndTheLast) {
  expect_activation_peak(setup({.policy = "every_n_layers", .every_n_layers = 2}), 4, 1, 2);
  expect_activation_peak(setup({.policy = "every_n_layers", .every_n_layers = 3}), 4, 1, 3);
  expect_activation_peak(setup({.policy = "every_n_layers", .every_n_layers = 1}), 4, 1, 1);
}
TEST(ActivationPeak, ListedLayersKeepNothing) {
  expect_activation_peak(setup({.policy = "layers", .layers = {0, 2}}), 4, 1, 2);
}
TEST(ActivationPeak, CheckpointingTheLastBlockAloneSavesNothing) {
  expect_activation_peak(setup({.policy = "layers", .layers = {3}}), 4, 1, 4);
}
TEST(ActivationPeak, SegmentsKeepTheirFirstInputs) {
  expect_activation_peak(setup({.policy = "segments", .segments = 2}, 6), 1 + 3, 1, 1);
  expect_activation_peak(setup({.policy = "segments", .segments = 3}, 6), 2 + 2, 1, 1);
  expect_activation_peak(setup({.policy = "segments", .segments = 1}, 6), 6, 1, 1);
}
TEST(ActivationPeak, SelectiveKeepsWhatIsNamedAndRead) {
  RunSetup s = setup({.policy = "selective"});
  const Block b(s);
  const double full = 4 * b.C + b.C + b.saved + b.C + 1;  // the last block keeps everything
  for (const Kept& kept : kept_of_gpt2(s)) {
    s.policy.keep = {{.keep = kept.names}};
    SCOPED_TRACE(kept.names[0]);
    expect_activations(s, full + 3 * kept.values);
  }
  s.policy.keep = {{.layers = {0, 3}, .keep = {"norms"}}, {.layers = {1}, .keep = {"qkv"}}};
  expect_activations(s, full + 2 * b.C + 3 * b.C);
}
TEST(ActivationPeak, MicroBatchesOneAfterTheOtherAddNothing) {
  for (const char* policy : {"none", "full"}) {
    RunSetup s = setup({.policy = policy});
    s.plan.micro_batches = 3;
    expect_activation_peak(s, 4, 1, s.policy.policy == "full" ? 1 : 4);
  }
}
TEST(ActivationPeak, LayerMajorKeepsTheInputsOfAllMicroBatches) {
  RunSetup s = setup({.policy = "full"});
  s.plan.micro_batches = 3;
  s.plan.order = AccumulationOrder::LayerMajor;
  expect_activation_peak(s, 3 * 4, 3, 1);
}

void expect_recomputed(const RunSetup& s, double reruns, double whole_forwards) {
  const Block b(s);
  const RunResult r = train(s);
  EXPECT_EQ(r.recomputed_flops, (reruns * b.rerun + whole_forwards * b.forward) * tokens(s)) << s.policy.policy;
  EXPECT_EQ(r.forward_flops,
            (static_cast<double>(s.model.layers) * b.forward + b.roots) * tokens(s) * s.plan.micro_batches);
}

// At most two blocks' values are on the device: the ones on their way, and those of the block that runs.
TEST(ActivationPeak, OffloadedValuesWaitInHostMemory) {
  for (const int layers : {4, 6, 8}) {
    RunSetup s = setup({.policy = "full", .offload = {.names = {"all"}}}, layers);
    const Block b(s);
    const auto bytes = [&](double per_token) {
      return static_cast<std::int64_t>(sizeof(float) * per_token * tokens(s));
    };
    RunResult r = train(s);
    EXPECT_EQ(r.peak[index(Tag::Host)], bytes((layers - 1) * b.C));  // the last block's backward comes first
    // At the end of the last block's forward: the input of the one before, its own, its set, the last product, the
    // output.
    EXPECT_EQ(r.peak[index(Tag::Activations)], bytes(b.saved + 4 * b.C));
    EXPECT_EQ(r.recomputed_flops, (layers - 1) * b.rerun * tokens(s));
    s.policy.policy = "none";
    r = train(s);
    EXPECT_EQ(r.peak[index(Tag::Host)], bytes((layers - 1) * (b.C + b.saved)));
    // Forward, at the end of a block: two blocks' inputs and sets, the last product and the output.
    EXPECT_EQ(r.peak[index(Tag::Activations)], bytes(2 * (b.C + b.saved) + 2 * b.C));
    EXPECT_EQ(r.recomputed_flops, 0);
    s.policy.offload = {.names = {"all"}, .keep_last = layers};
    EXPECT_EQ(train(s).peak[index(Tag::Host)], 0);
    s.policy.offload = {.names = {"mlp.up"}, .keep_last = 2, .fraction = 0.5};
    EXPECT_EQ(train(s).peak[index(Tag::Host)], bytes((layers - 2) / 2 * b.F));
  }
}
TEST(ActivationPeak, OffloadingTakesHostMemoryInTheFirstStepOnly) {
  RunSetup s = setup({.policy = "full", .offload = {.names = {"all"}}});
  s.plan.micro_batches = 2;
  const RunResult r = train(s);
  const auto of_host = [](const Allocator::Event& e) { return e.tag == Tag::Host; };
  EXPECT_EQ(std::ranges::count_if(r.events[0], of_host), 3);
  EXPECT_EQ(std::ranges::count_if(r.events[1], of_host), 0);
}

TEST(Recompute, NoneRunsNothingTwice) { expect_recomputed(setup({.policy = "none"}), 0, 0); }
TEST(Recompute, FullRerunsWhatBackwardReadsInAllButTheLastBlock) { expect_recomputed(setup({.policy = "full"}), 3, 0); }
TEST(Recompute, EveryNLayersRerunsThoseLayers) {
  expect_recomputed(setup({.policy = "every_n_layers", .every_n_layers = 2}), 2, 0);
  expect_recomputed(setup({.policy = "every_n_layers", .every_n_layers = 1}), 3, 0);
  expect_recomputed(setup({.policy = "every_n_layers", .every_n_layers = 100}), 1, 0);
}
TEST(Recompute, SegmentsReplayAllButTheirLastBlock) {
  expect_recomputed(setup({.policy = "segments", .segments = 2}, 6), 5, 2);
  expect_recomputed(setup({.policy = "segments", .segments = 3}, 6), 5, 2);
}
TEST(Recompute, SelectiveSparesWhatMakesTheKeptValues) {
  RunSetup s = setup({.policy = "selective"});
  for (const Kept& kept : kept_of_gpt2(s)) {
    s.policy.keep = {{.keep = kept.names}};
    EXPECT_EQ(train(s).recomputed_flops, 3 * (Block(s).rerun - kept.spared) * tokens(s)) << kept.names[0];
  }
  s.policy.keep = {{.layers = {0, 2}, .keep = {"*"}}};
  expect_recomputed(s, 1, 0);
}
TEST(Recompute, EveryMicroBatchIsRecomputed) {
  RunSetup s = setup({.policy = "full"});
  s.plan.micro_batches = 2;
  expect_recomputed(s, 2 * 3, 0);
  s.plan.order = AccumulationOrder::LayerMajor;  // only the last micro-batch of the last block is not run again
  expect_recomputed(s, 2 * 4 - 1, 0);
}
TEST(Recompute, EveryOperationOnceAtMost) {
  const RunResult r = train(setup({.policy = "full"}));
  const std::map<std::string, int, std::less<>> expected{
      {"layer_norm", 6}, {"linear", 9}, {"attention", 3}, {"gelu", 3}, {"add", 3}};
  EXPECT_EQ(r.reruns, expected);
}

TEST(Sharding, EveryRankHoldsThePaddedShareOfParametersGradientsAndOptimizer) {
  for (const int world : {1, 2, 3, 4}) {
    RunSetup s = setup({.policy = "full"});
    s.world = world;
    const std::int64_t share = UnitSizes(s.model, world).all(s.model.layers) * 4;
    const RunResult r = train(s);
    EXPECT_EQ(r.before[index(Tag::Parameters)], share) << world;
    EXPECT_EQ(r.before[index(Tag::Gradients)], share) << world;
    EXPECT_EQ(r.before[index(Tag::Optimizer)], 2 * share) << world;
    EXPECT_EQ(r.before[index(Tag::Gathered)], 0);
    EXPECT_EQ(r.peak[index(Tag::Gradients)], share);  // no full-size gradient outlives its block
  }
}

TEST(Sharding, FrozenParametersHaveNoGradientAndNoOptimizerState) {
  RunSetup s = setup({.policy = "full"});
  s.model.frozen = {"wte.weight", "wpe.weight", "*.mlp.*", "*.c_attn.*", "*.c_proj.*"};
  const std::int64_t C = s.model.hidden,
                     trained = 4 * ((4 * C + 1) / 2) + C;  // the norms of four blocks and of the head
  const RunResult r = train(s);
  EXPECT_EQ(r.before[index(Tag::Gradients)], trained * 4);
  EXPECT_EQ(r.before[index(Tag::Optimizer)], 2 * trained * 4);
}

TEST(Sharding, StrategiesHoldWhatTheySay) {
  RunSetup s = setup({.policy = "full"});
  const std::int64_t share = UnitSizes(s.model, 2).all(4) * 4, whole = 2 * share;
  const auto held = [&](Strategy strategy) {
    s.strategy = strategy;
    const RunResult r = train(s);
    return std::array{r.before[index(Tag::Parameters)], r.before[index(Tag::Gradients)],
                      r.before[index(Tag::Optimizer)]};
  };
  EXPECT_EQ(held(Strategy::Full), (std::array{share, share, 2 * share}));
  EXPECT_EQ(held(Strategy::Gradients), (std::array{whole, share, 2 * share}));
  EXPECT_EQ(held(Strategy::Optimizer), (std::array{whole, share + whole, 2 * share}));
}

TEST(Sharding, NeverMoreThanTheSlotsAreGathered) {
  for (int slots = 1; slots <= 4; ++slots)
    for (const char* policy : {"none", "full", "segments"}) {
      RunSetup s = setup({.policy = policy, .segments = 2});
      s.plan.slots = slots;
      const UnitSizes sizes(s.model, 2);
      const std::int64_t left_behind = (4 - slots) * 13 * s.model.hidden * 4;  // gains and biases of evicted blocks
      EXPECT_EQ(train(s).peak[index(Tag::Gathered)],
                2 * 4 * (slots * sizes.block_shard + sizes.table_shard + sizes.head_shard) + left_behind);
    }
}

TEST(Sharding, ReducingOnceKeepsWholeGradientsThroughTheStep) {
  RunSetup s = setup({.policy = "full"});
  s.plan.micro_batches = 2;
  const std::int64_t share = UnitSizes(s.model, 2).all(4) * 4;
  EXPECT_EQ(train(s).peak[index(Tag::Gradients)], share);
  s.plan.reduce = ReduceWhen::Once;
  EXPECT_GT(train(s).peak[index(Tag::Gradients)], 2 * share);
}

// The same step without storage makes the same allocations and releases, in the same order.
TEST(MemoryReplay, PredictsEveryAllocationOfAStep) {
  for (const char* policy : {"none", "full", "segments", "selective"})
    for (const auto order : {AccumulationOrder::BatchMajor, AccumulationOrder::LayerMajor})
      for (const Strategy strategy : {Strategy::Full, Strategy::Gradients, Strategy::None}) {
        RunSetup s = setup({.policy = policy, .segments = 2});
        s.plan.micro_batches = 2;
        s.plan.order = order;
        s.strategy = strategy;
        if (strategy == Strategy::Full) s.policy.offload.names = {"all"};
        const RunResult real = train(s);
        s.mode = Allocator::Mode::Meta;
        RunResult meta;
        std::mutex mutex;
        run_rank(s, make_model(s.model), *make_dry_communicator(0, s.world), meta, mutex);
        EXPECT_EQ(meta.peak_total, real.peak_total);
        EXPECT_TRUE(meta.events == real.events) << policy;
        EXPECT_TRUE(differences(meta.collectives[1], real.collectives[1]).empty());
      }
}

}  // namespace
}  // namespace regather::testing
