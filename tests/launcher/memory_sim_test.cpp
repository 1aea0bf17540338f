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
    // Of what backward reads besides the block's input, what is costly: q k v, attention's output and log-sum-exp, the
    // middle of the residual, the MLP before its activation.
    costly = 3 * C + C + static_cast<double>(s.model.heads) + C + F;
    saved = costly + 2 * C + F;  // and both norms, and the MLP after its activation
    const double norm = 8 * C, attention = 4 * C * (T + 1) / 2;
    cheap = 2 * norm + 20 * F;
    rerun = norm + 2 * C * 3 * C + attention + 2 * C * C + C + norm + 2 * C * F + 20 * F;
    forward = rerun + 2 * F * C + C;  // the last product and the last residual are never needed again
    roots = C + norm + 2 * C * V;     // positions; the head's norm and product
  }
  double C, F, T, V, costly, saved, cheap, rerun, forward, roots;
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

// Values of a token at the peak. keeps: by block, whether it keeps what is costly, as the last one does under every
// policy. below: block inputs that are kept besides those of these blocks; beside: outputs of the last block while it
// makes one more.
double peak_values(const Block& b, const std::vector<bool>& keeps, double below = 0, double beside = 0) {
  double most = 0, held = below * b.C;
  for (std::size_t i = 0; i < keeps.size(); ++i) {
    held += b.C;  // its input
    const bool last = i + 1 == keeps.size();
    // Backward: everything once more; or the MLP after its activation, where the rest is there.
    most = std::max(most, held + (last || keeps[i] ? b.costly + b.F : b.saved));
    if (last || keeps[i]) held += b.costly;
  }
  held += beside * b.C;
  return std::max({most, held + b.F + b.C,  // the end of the last forward: the last product, of the MLP's activation
                   held + b.C + b.C + 1});  // the head: its input, its norm and the losses
}
void expect_activation_peak(const RunSetup& s, const std::vector<bool>& keeps, double below = 0, double beside = 0) {
  expect_activations(s, peak_values(Block(s), keeps, below, beside));
}

TEST(ActivationPeak, NoneKeepsWhatIsCostlyOfEveryBlock) {
  expect_activation_peak(setup({.policy = "none"}), {true, true, true, true});
  const RunSetup s = setup({.policy = "none"}, 12);
  const Block b(s);
  EXPECT_LE(b.C + b.costly - static_cast<double>(s.model.heads), 11 * b.C);
  expect_activations(s, 12 * (b.C + b.costly) + b.F + b.C);
}
TEST(ActivationPeak, FullKeepsInputsAndOneBlocksSet) {
  expect_activation_peak(setup({.policy = "full"}), {false, false, false, true});
}
TEST(ActivationPeak, EveryNLayersKeepsTheOthersAndTheLast) {
  expect_activation_peak(setup({.policy = "every_n_layers", .every_n_layers = 2}), {false, true, false, true});
  expect_activation_peak(setup({.policy = "every_n_layers", .every_n_layers = 3}), {false, true, true, false});
  expect_activation_peak(setup({.policy = "every_n_layers", .every_n_layers = 1}), {false, false, false, false});
}
TEST(ActivationPeak, ListedLayersKeepNothing) {
  expect_activation_peak(setup({.policy = "layers", .layers = {0, 2}}), {false, true, false, true});
}
TEST(ActivationPeak, CheckpointingTheLastBlockAloneSavesNothing) {
  expect_activation_peak(setup({.policy = "layers", .layers = {3}}), {true, true, true, true});
}
TEST(ActivationPeak, SegmentsKeepTheirFirstInputs) {
  expect_activation_peak(setup({.policy = "segments", .segments = 2}, 6), {false, false, true}, 1);
  expect_activation_peak(setup({.policy = "segments", .segments = 3}, 6), {false, true}, 2);
  expect_activation_peak(setup({.policy = "segments", .segments = 1}, 6), {false, false, false, false, false, true});
}
TEST(ActivationPeak, SelectiveKeepsWhatIsNamedAndRead) {
  RunSetup s = setup({.policy = "selective"});
  const Block b(s);
  const double forward = 4 * b.C + b.costly + b.F + b.C;  // the last block keeps what is costly
  for (const Kept& kept : kept_of_gpt2(s)) {
    s.policy.keep = {{.keep = kept.names}};
    SCOPED_TRACE(kept.names[0]);
    // Or in the backward of the block before, with what it kept among the rest.
    expect_activations(s, std::max(forward + 3 * kept.values, 3 * b.C + b.saved + 2 * kept.values));
  }
  s.policy.keep = {{.layers = {0, 3}, .keep = {"norms"}}, {.layers = {1}, .keep = {"qkv"}}};
  expect_activations(s, forward + 2 * b.C + 3 * b.C);
}
TEST(ActivationPeak, MicroBatchesOneAfterTheOtherAddNothing) {
  for (const char* policy : {"none", "full"}) {
    RunSetup s = setup({.policy = policy});
    s.plan.micro_batches = 3;
    const bool keeps = s.policy.policy == "none";
    expect_activation_peak(s, {keeps, keeps, keeps, keeps});
  }
}
TEST(ActivationPeak, LayerMajorKeepsTheInputsOfAllMicroBatches) {
  RunSetup s = setup({.policy = "full"});
  s.plan.micro_batches = 3;
  s.plan.order = AccumulationOrder::LayerMajor;
  const Block b(s);
  expect_activations(s, std::max({12 * b.C + 2 * b.C + b.costly + b.F + b.C,  // the last block, for the last time
                                  12 * b.C + 3 * b.C + b.costly + b.C + 1,    // the head, for the first time
                                  11 * b.C + b.saved}));                      // its backward for the micro-batch before
}

// Backwards that run everything again that they read; the others do so with what is cheap.
void expect_recomputed(const RunSetup& s, double reruns, double whole_forwards) {
  const Block b(s);
  const RunResult r = train(s);
  const double others = static_cast<double>(s.model.layers) * s.plan.micro_batches - reruns;
  EXPECT_EQ(r.recomputed_flops, (reruns * b.rerun + others * b.cheap + whole_forwards * b.forward) * tokens(s))
      << s.policy.policy;
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
    // In the backward of the block before the last: its input, one that comes back, and everything once more.
    EXPECT_EQ(r.peak[index(Tag::Activations)], bytes(2 * b.C + b.saved));
    EXPECT_EQ(r.recomputed_flops, ((layers - 1) * b.rerun + b.cheap) * tokens(s));
    s.policy.policy = "none";
    r = train(s);
    EXPECT_EQ(r.peak[index(Tag::Host)], bytes((layers - 1) * (b.C + b.costly)));
    // Forward, at the end of a block: two blocks' inputs and sets, the last product and what it is of.
    EXPECT_EQ(r.peak[index(Tag::Activations)], bytes(2 * (b.C + b.costly) + b.F + b.C));
    EXPECT_EQ(r.recomputed_flops, layers * b.cheap * tokens(s));
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

TEST(Recompute, NoneRunsOnlyWhatIsCheapTwice) { expect_recomputed(setup({.policy = "none"}), 0, 0); }
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
    EXPECT_EQ(train(s).recomputed_flops, (3 * (Block(s).rerun - kept.spared) + Block(s).cheap) * tokens(s))
        << kept.names[0];
  }
  s.policy.keep = {{.layers = {0, 2}, .keep = {"*"}}};
  EXPECT_EQ(train(s).recomputed_flops, (Block(s).rerun + Block(s).cheap) * tokens(s));  // of block 1, and of the last
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
      {"layer_norm", 8}, {"linear", 9}, {"attention", 3}, {"gelu", 4}, {"add", 3}};
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
