// What a model does with dropout and with frozen parameters, on one device.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "model/registry.h"
#include "tests/model/single_device.h"

namespace regather {
namespace {

using testing::SingleDevice;
using testing::WholeUnit;

class Training : public ::testing::TestWithParam<const char*> {
 protected:
  static ModelConfig small() {
    ModelConfig config;
    config.type = GetParam();
    config.layers = 2;
    config.hidden = 32;
    config.heads = 4;
    config.vocab = 61;
    config.max_sequence = 8;
    config.init_std = 0.2F;
    return config;
  }
  static ModelConfig dropping() {
    ModelConfig config = small();
    config.dropout = 0.3F;
    return config;
  }
  // [rows, 8] of one stream of tokens, from sequence `first` on; shift 1: its targets.
  static Tensor tokens(SingleDevice& single, std::int64_t rows, std::int64_t first, std::int64_t shift) {
    Tensor t(single.device.memory, {rows, 8}, Tag::Workspace, DType::I32);
    for (std::int64_t i = 0; i < rows * 8; ++i)
      t.fresh<std::int32_t>()[i] = static_cast<std::int32_t>(((first * 8 + i + shift) * 37 + 11) % 61);
    return t;
  }
  static double step(SingleDevice& single, std::int64_t rows, std::int64_t first, const RngKey& key,
                     const SavePlan& plan = keep_all()) {
    return single.step(tokens(single, rows, first, 0), tokens(single, rows, first, 1), plan, key);
  }
  static std::vector<float> gradients(SingleDevice& single) {
    std::vector<float> all;
    for (auto& unit : single.units)
      all.insert(all.end(), unit->gradients->flat(), unit->gradients->flat() + unit->gradients->elements());
    return all;
  }
};

TEST_P(Training, DropoutIsTheSameWhenRerunAndAnotherInAnotherStep) {
  SingleDevice single(make_model(dropping()), 1);
  const double kept = step(single, 4, 0, {.seed = 1, .step = 3});
  const std::vector<float> expected = gradients(single);
  EXPECT_EQ(step(single, 4, 0, {.seed = 1, .step = 3}, drop_all()), kept);
  EXPECT_EQ(gradients(single), expected);
  EXPECT_NE(step(single, 4, 0, {.seed = 1, .step = 4}), kept);
  EXPECT_NE(step(single, 4, 0, {.seed = 2, .step = 3}), kept);
}

TEST_P(Training, DropoutMasksBelongToTheSequenceNotToTheBatchThatHoldsIt) {
  SingleDevice single(make_model(dropping()), 1);
  const double whole = step(single, 4, 0, {.seed = 1, .step = 1});
  const double first = step(single, 2, 0, {.seed = 1, .step = 1, .sequence = 0});
  const double second = step(single, 2, 2, {.seed = 1, .step = 1, .sequence = 2});
  EXPECT_NEAR((first + second) / 2, whole, 1e-6 * whole);
  EXPECT_NE(step(single, 2, 2, {.seed = 1, .step = 1, .sequence = 0}), second);
}

TEST_P(Training, EvaluationDropsNothing) {
  SingleDevice plain(make_model(small()), 1), dropped(make_model(dropping()), 1);
  const Tensor x = tokens(plain, 4, 0, 0), y = tokens(plain, 4, 0, 1);
  EXPECT_EQ(dropped.evaluate(x, y), plain.evaluate(x, y));
  EXPECT_NE(dropped.step(x, y), plain.step(x, y));
}

TEST_P(Training, FrozenParametersGetNoGradientAndTheOthersTheSameOne) {
  SingleDevice free(make_model(small()), 1);
  step(free, 4, 0, {});
  const bool gpt2 = GetParam() == std::string("gpt2");
  for (const char* pattern : {gpt2 ? "*ln_*" : "*norm*", "*attn*", "*mlp*", gpt2 ? "wte.weight" : "*embed*", "*.0.*"}) {
    ModelConfig config = small();
    config.frozen = {pattern};
    SingleDevice single(make_model(config), 1);
    step(single, 4, 0, {});
    for (std::size_t u = 0; u < single.units.size(); ++u) {
      const WholeUnit& unit = *single.units[u];
      for (int i = 0; i < static_cast<int>(unit.table().size()); ++i) {
        const ParamInfo& info = unit.table()[static_cast<std::size_t>(i)];
        EXPECT_EQ(unit.gradients->written(i), info.trainable) << pattern << ": " << info.name;
        if (!info.trainable) continue;
        EXPECT_TRUE(std::ranges::equal(unit.gradient(i), free.units[u]->gradient(i))) << pattern << ": " << info.name;
      }
    }
  }
}

TEST_P(Training, ABlockNamesItsValuesAndDropsAtBothResiduals) {
  SingleDevice single(make_model(dropping()), 1);
  Tensor x(single.device.memory, {2, 8, 32}, Tag::Activations);
  std::fill_n(x.fresh(), x.numel(), 0.5F);
  std::string names, producers;
  for (const Tape::ValueReport& value : single.record(single.model().blocks[0], {x})) {
    names += value.name + " ";
    producers += value.producer + " ";
  }
  const bool gpt2 = GetParam() == std::string("gpt2");
  for (const char* mark :
       {"attn.norm", "attn.qkv", "attn.core", "attn.out", "mid", "mlp.norm", "mlp.up", "mlp.act", "mlp.down"})
    EXPECT_NE(names.find(std::string(mark) + " "), std::string::npos) << mark << " in " << names;
  EXPECT_EQ(producers,
            gpt2 ? "input layer_norm linear attention attention linear dropout add layer_norm linear gelu linear "
                   "dropout add "
                 : "input rms_norm linear rope attention attention linear dropout add rms_norm linear linear swiglu "
                   "linear dropout add ");
}

TEST_P(Training, TheEmbeddingDropsToo) {
  SingleDevice single(make_model(dropping()), 1);
  const std::vector<Tape::ValueReport> values = single.record(single.model().embedding, {tokens(single, 2, 0, 0)});
  EXPECT_EQ(values.back().producer, "dropout");
}

TEST_P(Training, NothingIsLiveAfterAStepButTheGradients) {
  SingleDevice single(make_model(small()), 1);
  step(single, 4, 0, {});
  EXPECT_EQ(single.device.memory.live(Tag::Activations), 0);
  EXPECT_EQ(single.device.memory.live(Tag::Workspace), 0);
  EXPECT_EQ(single.device.memory.live(Tag::Gradients), 4 * single.model().num_parameters());
}

INSTANTIATE_TEST_SUITE_P(Models, Training, ::testing::Values("gpt2", "llama"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace regather
