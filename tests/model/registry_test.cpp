#include "model/registry.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

namespace regather {
namespace {

std::string refusal(const ModelConfig& config) {
  try {
    make_model(config);
  } catch (const UsageError& e) {
    return e.what();
  }
  return "accepted";
}

std::vector<std::string> names(const UnitSpec& unit) {
  std::vector<std::string> all;
  for (const ParamInfo& p : unit.params) all.push_back(p.name);
  return all;
}

std::map<std::string, ParamInfo> by_name(const Model& model) {
  std::map<std::string, ParamInfo> all;
  for (const UnitSpec& unit : model.units)
    for (const ParamInfo& p : unit.params) EXPECT_TRUE(all.emplace(p.name, p).second) << p.name << " twice";
  return all;
}

ModelConfig sizes(const std::string& type) {
  ModelConfig config;
  config.type = type;
  config.layers = 2;
  config.hidden = 32;
  config.heads = 4;
  config.vocab = 257;
  config.max_sequence = 16;
  return config;
}

TEST(Registry, AnUnknownTypeIsRefusedWithTheKnownOnes) {
  EXPECT_EQ(refusal(sizes("gtp2")), "model.type: 'gtp2' is unknown; known: gpt2, llama");
}

TEST(Registry, AProgramCanAddAModelOfItsOwn) {
  ModelRegistry registry = built_in_models();
  registry.push_back({"mine", [](const ModelConfig& config) {
                        Model model = make_model(sizes("gpt2"));
                        model.vocab = config.layers + 5;
                        return model;
                      }});
  EXPECT_EQ(make_model(sizes("mine"), registry).vocab, 7);
}

TEST(Registry, ANameThatIsTakenIsRefused) {
  ModelRegistry registry = built_in_models();
  registry.push_back(registry[0]);
  EXPECT_THROW(make_model(sizes("gpt2"), registry), UsageError);
  EXPECT_NO_THROW(make_model(sizes("llama"), registry));
}

TEST(Registry, SizesThatDoNotFitAreRefusedWithBothSides) {
  const auto with = [](const char* type, auto change) {
    ModelConfig config = sizes(type);
    change(config);
    return refusal(config);
  };
  using Config = ModelConfig;
  EXPECT_EQ(with("gpt2", [](Config& c) { c.heads = 5; }), "model.heads: 5 does not divide model.hidden (32)");
  EXPECT_EQ(with("gpt2", [](Config& c) { c.kv_heads = 2; }),
            "model.kv_heads: gpt2 has as many as model.heads (4), not 2");
  EXPECT_EQ(with("gpt2", [](Config& c) { c.rope_theta = 500; }),
            "model.rope_theta: gpt2 learns its positions and cannot use 500");
  EXPECT_EQ(with("llama", [](Config& c) { c.kv_heads = 3; }), "model.kv_heads: must divide model.heads (4), but is 3");
  EXPECT_EQ(with("llama", [](Config& c) { c.heads = 32; }),
            "model.heads: rotary positions need an even head size, but hidden 32 / heads 32 is 1");
  EXPECT_EQ(with("llama", [](Config& c) { c.rope_theta = 0; }), "model.rope_theta: must be above 0, but is 0");
  for (const char* type : {"gpt2", "llama"}) {
    EXPECT_EQ(with(type, [](Config& c) { c.layers = 0; }), "model.layers: must be at least 1, but is 0");
    EXPECT_EQ(with(type, [](Config& c) { c.vocab = 0; }), "model.vocab: must be at least 1, but is 0");
    EXPECT_EQ(with(type, [](Config& c) { c.ffn_hidden = -1; }), "model.ffn_hidden: must be at least 1, but is -1");
    EXPECT_EQ(with(type, [](Config& c) { c.dropout = 1; }), "model.dropout: must be at least 0 and below 1, but is 1");
  }
}

TEST(Gpt2, UnitsAreTheTableThePositionsTheBlocksAndTheHead) {
  const Model model = make_model(sizes("gpt2"));
  ASSERT_EQ(model.units.size(), 5U);
  EXPECT_EQ(model.units[0].name, "wte");
  EXPECT_EQ(names(model.units[0]), std::vector<std::string>{"wte.weight"});
  EXPECT_EQ(model.units[1].name, "wpe");
  EXPECT_EQ(names(model.units[1]), std::vector<std::string>{"wpe.weight"});
  EXPECT_EQ(model.units[3].name, "block 1");
  EXPECT_EQ(names(model.units[3]),
            (std::vector<std::string>{"h.1.ln_1.weight", "h.1.ln_1.bias", "h.1.attn.c_attn.weight",
                                      "h.1.attn.c_attn.bias", "h.1.attn.c_proj.weight", "h.1.attn.c_proj.bias",
                                      "h.1.ln_2.weight", "h.1.ln_2.bias", "h.1.mlp.c_fc.weight", "h.1.mlp.c_fc.bias",
                                      "h.1.mlp.c_proj.weight", "h.1.mlp.c_proj.bias"}));
  EXPECT_EQ(model.units[4].name, "head");
  EXPECT_EQ(names(model.units[4]), (std::vector<std::string>{"ln_f.weight", "ln_f.bias"}));
  EXPECT_EQ(model.embedding.units, (std::vector<int>{0, 1}));
  EXPECT_EQ(model.blocks[1].units, std::vector<int>{3});
  EXPECT_EQ(model.head.units, (std::vector<int>{4, 0}));
  EXPECT_FALSE(model.embedding.block->differentiable(0));
  EXPECT_TRUE(model.head.block->differentiable(0));
  EXPECT_FALSE(model.head.block->differentiable(1));
}

TEST(Gpt2, HasAsManyParametersAsThePublishedSmallModel) {
  ModelConfig config;
  config.layers = 12;
  config.hidden = 768;
  config.heads = 12;
  config.vocab = 50257;
  config.max_sequence = 1024;
  EXPECT_EQ(make_model(config).num_parameters(), 124439808);
}

TEST(Llama, HasAsManyParametersAsThePublishedModels) {
  ModelConfig config;
  config.type = "llama";
  config.layers = config.heads = 32;
  config.hidden = 4096;
  config.ffn_hidden = 11008;
  config.vocab = 32000;
  config.tie_embeddings = false;
  EXPECT_EQ(make_model(config).num_parameters(), 6738415616);
  config.kv_heads = 8;
  config.ffn_hidden = 14336;
  config.vocab = 128256;
  EXPECT_EQ(make_model(config).num_parameters(), 8030261248);
}

TEST(Llama, UnitsAreTheTableTheBlocksAndTheHead) {
  ModelConfig config = sizes("llama");
  config.kv_heads = 2;
  const Model tied = make_model(config);
  ASSERT_EQ(tied.units.size(), 4U);
  EXPECT_EQ(names(tied.units[0]), std::vector<std::string>{"model.embed_tokens.weight"});
  EXPECT_EQ(names(tied.units[3]), std::vector<std::string>{"model.norm.weight"});
  EXPECT_EQ(tied.head.units, (std::vector<int>{3, 0}));
  EXPECT_EQ(by_name(tied).at("model.layers.0.self_attn.qkv_proj.weight").shape, (Shape{64, 32}));
  EXPECT_EQ(by_name(tied).at("model.layers.0.mlp.down_proj.weight").shape, (Shape{32, 128}));
  config.tie_embeddings = false;
  const Model untied = make_model(config);
  EXPECT_EQ(names(untied.units[3]), (std::vector<std::string>{"model.norm.weight", "lm_head.weight"}));
  EXPECT_EQ(untied.head.units, std::vector<int>{3});
}

TEST(Models, AdaptersComeAfterTheBasesParametersAndAloneAreTrained) {
  for (const char* type : {"gpt2", "llama"}) {
    ModelConfig config = sizes(type);
    config.lora = {.rank = 8, .alpha = 4, .targets = {"attn.qkv", "mlp.down"}};
    const Model model = make_model(config);
    config.lora.rank = 0;
    const Model base = make_model(config);
    for (std::size_t u = 0; u < base.units.size(); ++u) {
      const auto with = names(model.units[u]), without = names(base.units[u]);
      EXPECT_TRUE(std::equal(without.begin(), without.end(), with.begin())) << "the blocks' numbers stay";
    }
    for (const auto& [name, param] : by_name(model)) {
      const bool down = name.ends_with(".lora_A.weight"), up = name.ends_with(".lora_B.weight");
      EXPECT_EQ(param.trainable, down || up) << name;
      if (up) {
        EXPECT_EQ(param.init.kind, Init::Kind::Zeros) << name;
      }
      if (!down) continue;
      EXPECT_EQ(param.init.kind, Init::Kind::Uniform) << name;
      EXPECT_FLOAT_EQ(param.init.bound, 1.0F / std::sqrt(static_cast<float>(param.shape.cols()))) << name;
    }
    const bool gpt2 = config.type == "gpt2";
    const ParamInfo& qkv = model.units[gpt2 ? 2 : 1].params[gpt2 ? 2 : 1];
    ASSERT_EQ(qkv.adapters.size(), gpt2 ? 1U : 3U);
    std::int64_t rows = 0;
    for (const Adapter& a : qkv.adapters) {
      EXPECT_EQ(a.first, rows);
      EXPECT_EQ(a.scale, 0.5F);
      rows += a.rows;
    }
    EXPECT_EQ(rows, qkv.shape.rows());
  }
}

TEST(Models, MatricesDecayAndBiasesAndGainsDoNot) {
  for (const char* type : {"gpt2", "llama"}) {
    ModelConfig config = sizes(type);
    config.tie_embeddings = false;
    for (const auto& [name, param] : by_name(make_model(config))) {
      EXPECT_EQ(param.decay, param.shape.ndim() == 2) << name;
      EXPECT_TRUE(param.trainable) << name;
    }
  }
}

TEST(Models, ResidualProjectionsStartSmallerByTheSquareRootOfTwiceTheLayers) {
  for (const char* type : {"gpt2", "llama"}) {
    ModelConfig config = sizes(type);
    config.layers = 8;
    for (const auto& [name, param] : by_name(make_model(config))) {
      const bool residual =
          name.ends_with("c_proj.weight") || name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight");
      if (param.shape.ndim() == 2) {
        EXPECT_EQ(param.init.kind, Init::Kind::Normal) << name;
        EXPECT_FLOAT_EQ(param.init.std, residual ? 0.005F : 0.02F) << name;
      } else {
        EXPECT_EQ(param.init.kind, name.ends_with(".bias") ? Init::Kind::Zeros : Init::Kind::Ones) << name;
      }
    }
  }
}

TEST(Models, PatternsFreezeWhatTheyNameAndAPatternWithoutAMatchIsRefused) {
  ModelConfig config = sizes("gpt2");
  config.frozen = {"wte.weight", "h.1.*.weight"};
  std::set<std::string> frozen;
  for (const auto& [name, param] : by_name(make_model(config)))
    if (!param.trainable) frozen.insert(name);
  EXPECT_EQ(frozen,
            (std::set<std::string>{"wte.weight", "h.1.ln_1.weight", "h.1.attn.c_attn.weight", "h.1.attn.c_proj.weight",
                                   "h.1.ln_2.weight", "h.1.mlp.c_fc.weight", "h.1.mlp.c_proj.weight"}));
  config.frozen = {"wte.wieght"};
  EXPECT_TRUE(refusal(config).starts_with("model.frozen: no parameter matches 'wte.wieght'")) << refusal(config);
}

}  // namespace
}  // namespace regather
