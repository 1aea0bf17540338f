// Models against plain PyTorch in float64 (tests/golden/): start values, gradients of the first step, and five steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numbers>
#include <string>

#include "launcher/data.h"
#include "model/registry.h"
#include "tests/model/single_device.h"

namespace regather {
namespace {

using nlohmann::json;
using testing::SingleDevice;
using testing::WholeUnit;

const std::filesystem::path kGolden = std::filesystem::path(REGATHER_SOURCE_DIR) / "tests/golden";

ModelConfig config_of(const json& m) {
  ModelConfig config;
  config.type = m["type"];
  config.layers = m["layers"];
  config.hidden = m["hidden"];
  config.heads = m["heads"];
  config.kv_heads = m.value("kv_heads", 0);
  config.rope_theta = m.value("rope_theta", config.rope_theta);
  config.vocab = m["vocab"];
  config.max_sequence = m["max_sequence"];
  config.tie_embeddings = m["tie_embeddings"];
  config.init_std = m["init_std"];
  return config;
}

class Golden : public ::testing::TestWithParam<const char*> {
 protected:
  Golden()
      : golden_(json::parse(std::ifstream(kGolden / (std::string(GetParam()) + ".json")))),
        train_(golden_["train"]),
        single_(make_model(config_of(golden_["model"])), train_["seed"]),
        data_({.files = {kGolden / "text.txt"}, .sequence = train_["sequence"], .seed = train_["seed"]}) {}

  Batch batch(std::int64_t step) {  // steps from 0
    return data_.batch(single_.device, {.ranks = 1, .micro_batch = train_["global_batch"]}, 0, step, 0);
  }
  template <class F>
  void for_each_parameter(F f) {
    for (auto& unit : single_.units)
      for (std::size_t i = 0; i < unit->table().size(); ++i) f(*unit, static_cast<int>(i), unit->table()[i]);
  }
  static double norm_of(std::span<const float> values) {
    double squares = 0;
    for (const float x : values) squares += static_cast<double>(x) * static_cast<double>(x);
    return std::sqrt(squares);
  }
  double gradient_norm() {
    double squares = 0;
    for_each_parameter(
        [&](WholeUnit& unit, int i, const ParamInfo&) { squares += std::pow(norm_of(unit.gradient(i)), 2); });
    return std::sqrt(squares);
  }
  double learning_rate(int step) const {
    const double lr = train_["lr"], min_lr = train_["min_lr"], steps = train_["steps"], warmup = train_["warmup"];
    if (step <= warmup) return lr * step / warmup;
    return min_lr + 0.5 * (lr - min_lr) * (1 + std::cos(std::numbers::pi * (step - warmup) / (steps - warmup)));
  }
  // AdamW in double, from its definition. step: from 1.
  void update(int step, double norm) {
    const double b1 = train_["betas"][0], b2 = train_["betas"][1], eps = train_["eps"], decay = train_["weight_decay"];
    const double rate = learning_rate(step), scale = std::min(1.0, train_["clip"].get<double>() / norm);
    for_each_parameter([&](WholeUnit& unit, int i, const ParamInfo& info) {
      std::vector<Moments>& state = moments_[info.name];
      const std::span<float> p = unit.values(i);
      state.resize(p.size());
      for (std::size_t k = 0; k < p.size(); ++k) {
        const double g = static_cast<double>(unit.gradient(i)[k]) * scale;
        state[k].first = b1 * state[k].first + (1 - b1) * g;
        state[k].second = b2 * state[k].second + (1 - b2) * g * g;
        const double first = state[k].first / (1 - std::pow(b1, step)),
                     second = state[k].second / (1 - std::pow(b2, step));
        const double kept = static_cast<double>(p[k]) * (info.decay ? 1 - rate * decay : 1);
        p[k] = static_cast<float>(kept - rate * first / (std::sqrt(second) + eps));
      }
    });
  }

  struct Moments {
    double first = 0, second = 0;
  };
  json golden_, train_;
  SingleDevice single_;
  Dataset data_;
  std::map<std::string, std::vector<Moments>> moments_;
};

TEST_P(Golden, StartValuesAreThoseOfTheRecipe) {
  std::size_t seen = 0;
  for_each_parameter([&](WholeUnit& unit, int i, const ParamInfo& info) {
    ASSERT_TRUE(golden_["start"].contains(info.name)) << info.name;
    ++seen;
    for (std::size_t k = 0; k < golden_["start"][info.name].size(); ++k) {
      const auto expected = golden_["start"][info.name][k].get<float>();
      EXPECT_NEAR(unit.values(i)[k], expected, 2e-7F * std::abs(expected)) << info.name;
    }
  });
  EXPECT_EQ(seen, golden_["start"].size());
}

TEST_P(Golden, GradientsOfTheFirstStep) {
  const Batch b = batch(0);
  const double loss = single_.step(b.tokens, b.targets);
  EXPECT_NEAR(loss, golden_["loss"][0], 2e-5 * loss);
  EXPECT_NEAR(single_.evaluate(b.tokens, b.targets), loss, 1e-6 * loss);
  for_each_parameter([&](WholeUnit& unit, int i, const ParamInfo& info) {
    const json& expected = golden_["gradients"][info.name];
    const std::span<const float> g = unit.gradient(i);
    EXPECT_TRUE(unit.gradients->written(i)) << info.name;
    const double norm = expected["norm"], bound = 2e-5 * expected["max_abs"].get<double>();
    EXPECT_NEAR(norm_of(g), norm, 2e-5 * norm) << info.name;
    const std::size_t stride = expected["stride"];
    for (std::size_t k = 0; k < expected["elements"].size(); ++k)
      EXPECT_NEAR(g[k * stride], expected["elements"][k].get<double>(), bound) << info.name << "[" << k * stride << "]";
  });
}

TEST_P(Golden, LossesAndGradientNormsOfFiveSteps) {
  for (int step = 1; step <= 5; ++step) {
    const Batch b = batch(step - 1);
    const double loss = single_.step(b.tokens, b.targets), norm = gradient_norm();
    const auto i = static_cast<std::size_t>(step - 1);
    EXPECT_NEAR(loss, golden_["loss"][i], 2e-5 * loss) << "step " << step;
    EXPECT_NEAR(norm, golden_["grad_norm"][i], 2e-5 * norm) << "step " << step;
    update(step, norm);
  }
}

TEST_P(Golden, WhatIsKeptOrRerunDoesNotChangeABit) {
  const Batch b = batch(0);
  const double loss = single_.step(b.tokens, b.targets);
  std::map<std::string, std::vector<float>> expected;
  for_each_parameter([&](WholeUnit& unit, int i, const ParamInfo& info) {
    expected[info.name].assign(unit.gradient(i).begin(), unit.gradient(i).end());
  });
  SavePlan verified = drop_all();
  verified.order = Order::Eager;
  verified.verify = true;
  for (const SavePlan& plan :
       {drop_all(), keep_only({"attn.core"}), keep_only({"attn.qkv", "mlp.up"}), keep_only({"mid"}), verified}) {
    EXPECT_EQ(single_.step(b.tokens, b.targets, plan), loss);
    for_each_parameter([&](WholeUnit& unit, int i, const ParamInfo& info) {
      EXPECT_TRUE(std::ranges::equal(unit.gradient(i), expected[info.name])) << info.name;
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Golden, ::testing::Values("gpt2", "gpt2_untied", "llama", "llama_tied"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace regather
