#include "launcher/config.h"

#include <gtest/gtest.h>

#include <fstream>

#include "tests/launcher/config_text.h"
#include "tests/launcher/temporary_folder.h"

namespace regather::testing {
namespace {

TEST(Config, KeysThatAreLeftOutHaveTheirDefaults) {
  const Config config = parse(kData);
  EXPECT_EQ(config.model.type, "gpt2");
  EXPECT_EQ(config.model.vocab, 256);
  EXPECT_EQ(config.train.micro_batch, 4);
  EXPECT_EQ(config.sharding.strategy, ShardingConfig::Strategy::Full);
  EXPECT_EQ(config.sharding.prefetch_blocks(), 1);
  EXPECT_EQ(config.communication.timeout, std::chrono::seconds(60));
}

TEST(Config, TakesEveryKindOfValue) {
  const Config config = parse(R"(
model:
  type: llama
  layers: 5
  heads: 6
  kv_heads: 2
  dropout: 0.25
  tie_embeddings: false
  vocab: 257
  frozen: [wte.*, "h.0.*"]
data:
  files:
    - a.txt
    - "with space.txt"
train:
  optimizer:
    type: sgd
    lr: 1e-3
  reduce: once
  accumulation_order: layer_major
memory:
  limit: 1.5GiB
communication:
  timeout: 1500ms
sharding: {prefetch: 0, resident_slots: 3}
activation_checkpointing: {policy: layers, layers: [4, 0], order: ahead}
)");
  EXPECT_EQ(config.model.type, "llama");
  EXPECT_EQ(config.model.vocab, 257);
  EXPECT_EQ(config.model.dropout, 0.25F);
  EXPECT_FALSE(config.model.tie_embeddings);
  EXPECT_EQ(config.model.frozen, (Lines{"wte.*", "h.0.*"}));
  EXPECT_EQ(config.data.files, (Lines{"a.txt", "with space.txt"}));
  EXPECT_EQ(config.train.optimizer.type, OptimizerConfig::Type::Sgd);
  EXPECT_EQ(config.train.optimizer.lr, 1e-3);
  EXPECT_EQ(config.train.reduce, TrainConfig::Reduce::Once);
  EXPECT_EQ(config.train.accumulation_order, TrainConfig::AccumulationOrder::LayerMajor);
  EXPECT_EQ(config.memory.limit, std::int64_t{3} << 29);
  EXPECT_EQ(config.communication.timeout, std::chrono::milliseconds(1500));
  EXPECT_EQ(config.sharding.prefetch_blocks(), 0);
  EXPECT_EQ(config.activation_checkpointing.order, CheckpointingConfig::Order::Ahead);
  EXPECT_EQ(checkpoint_plan(config).checkpointed, (std::vector{0, 4}));
}

TEST(Config, TheEffectiveConfigurationParsesToItself) {
  const std::string text = R"(
model: {layers: 5, dropout: 0.1, init_std: 0.2, frozen: ["*.b", "say \"x\" \\ y"], vocab: 300}
data: {files: [/tmp/a b.txt, "-x", 'null']}
train: {optimizer: {lr: 0.1234567890123, eps: 3.3e-11}, schedule: {type: constant}, global_batch: 8}
memory: {limit: 1000001}
communication: {timeout: 90s, backend: sim, sim_ranks: 3}
activation_checkpointing: {policy: segments, segments: 2}
)";
  const std::string effective = to_yaml(parse(text));
  EXPECT_EQ(to_yaml(parse(effective)), effective);
  const Config again = parse(effective);
  EXPECT_EQ(again.train.optimizer.lr, 0.1234567890123);
  EXPECT_EQ(again.model.dropout, 0.1F);
  EXPECT_EQ(again.model.frozen[1], "say \"x\" \\ y");
  EXPECT_EQ(again.data.files, (Lines{"/tmp/a b.txt", "-x", "null"}));
  EXPECT_EQ(again.memory.limit, 1000001);
  EXPECT_EQ(again.communication.sim_ranks, 3);
  EXPECT_EQ(to_yaml(parse(kData)), to_yaml(parse(to_yaml(parse(kData)))));
  // Spelled so that a YAML 1.1 reader takes numbers for numbers.
  EXPECT_NE(to_yaml(parse(kData)).find("    eps: 1.0e-08\n"), std::string::npos) << to_yaml(parse(kData));
  EXPECT_NE(effective.find("  timeout: 90s\n"), std::string::npos);
}

TEST(Config, AKeyThatDoesNotExistIsRefusedWithTheNearestOne) {
  EXPECT_EQ(refusal(with_train("learnig_rate: 1e-3")),
            "c.yaml:4:3: train.learnig_rate: unknown key; did you mean train.optimizer.lr?");
  EXPECT_EQ(refusal(with_train("num-epochs: 3")),
            "c.yaml:4:3: train.num-epochs: unknown key; did you mean train.steps?");
  EXPECT_EQ(refusal(with_train("lora_r: 8")), "c.yaml:4:3: train.lora_r: unknown key; did you mean model.lora.rank?");
  EXPECT_EQ(refusal(with_train("micro-batch: 8")),
            "c.yaml:4:3: train.micro-batch: unknown key; did you mean train.micro_batch?");
  EXPECT_EQ(refusal(kData + "training:\n  steps: 8\n"), "c.yaml:3:1: training: unknown section; did you mean train?");
  EXPECT_EQ(refusal(with_train("xyzzyxyzzy: 8")), "c.yaml:4:3: train.xyzzyxyzzy: unknown key");
}

TEST(Config, AKeyInTheWrongSectionIsRefusedWithTheRightOne) {
  EXPECT_EQ(refusal(with_train("hidden: 64")), "c.yaml:4:3: train.hidden: unknown key; did you mean model.hidden?");
  EXPECT_EQ(refusal(with_train("lr: 1e-3")), "c.yaml:4:3: train.lr: unknown key; did you mean train.optimizer.lr?");
  EXPECT_EQ(refusal(kData + "steps: 5\n"), "c.yaml:3:1: steps: unknown key; did you mean train.steps?");
}

TEST(Config, AKeyGivenTwiceIsRefused) {
  EXPECT_EQ(refusal(kData + "train:\n  steps: 3\n  seed: 1\n  steps: 3\n"),
            "c.yaml:6:3: train.steps: given twice; first at c.yaml:4:3");
  EXPECT_EQ(refusal(kData + "eval: {every: 1}\neval: {every: 1}\n"),
            "c.yaml:4:1: eval: given twice; first at c.yaml:3:1");
  EXPECT_EQ(refusal(kData + "train.steps: 5\ntrain: {steps: 6}\n"),
            "c.yaml:4:9: train.steps: given twice; first at c.yaml:3:1");
  EXPECT_EQ(refusal(kData + "train: {steps: 6}\ntrain.steps: 5\n"),
            "c.yaml:4:1: train.steps: given twice; first at c.yaml:3:9");
}

TEST(Config, TabsAreRefusedByPlace) {
  EXPECT_EQ(refusal(kData + "train:\n\tsteps: 3\n"), "c.yaml:4:1: a tab in the indentation; allowed: spaces");
  EXPECT_EQ(refusal(kData + "\n\n  \n  \ttrain: 3\n"), "c.yaml:6:3: a tab in the indentation; allowed: spaces");
}

TEST(Config, BadIndentationIsRefusedByPlace) {
  EXPECT_EQ(refusal(kData + "train:\n  steps: 3\n   seed: 3\n").substr(0, 28), "c.yaml:5:8: not valid YAML: ");
  EXPECT_EQ(refusal(kData + "train:\nsteps: 3\n"), "c.yaml:4:1: steps: unknown key; did you mean train.steps?");
  EXPECT_EQ(refusal("data: [a\n").find("c.yaml:"), 0U);
}

TEST(Config, AnEmptyFileIsRefused) {
  for (const std::string text : {"", "\n\n", "# nothing\n", "---\n", "~\n"}) {
    EXPECT_EQ(refusal(text), "c.yaml: the configuration is empty") << text;
  }
}

TEST(Config, WhatIsNoSectionIsRefused) {
  EXPECT_EQ(refusal("- a\n- b\n"), "c.yaml:1:1: is not a configuration; allowed: `section:` and `key: value` lines");
  EXPECT_EQ(refusal(kData + "train: 5\n"),
            "c.yaml:3:8: train: is not a section; allowed: `key: value` lines, indented below it");
  EXPECT_EQ(refusal(kData + "---\ntrain: {}\n").find("c.yaml:4:1: a second document"), 0U);
  EXPECT_EQ(refusal("data: &a\n  files: [x]\n").find("c.yaml:1:7: an anchor"), 0U);
  EXPECT_EQ(refusal("data: *a\n").find("c.yaml:1:7: "), 0U);
  EXPECT_EQ(refusal("data: !!map {files: [x]}\n").find("c.yaml:1:7: a tag"), 0U);
}

TEST(Config, EveryNLayersBeginsWithTheFirstLayer) {
  const auto layers = [](const std::string& n) {
    const Config config = parse(
        "data: {files: [a]}\nmodel: {layers: 4}\nactivation_checkpointing: {policy: every_n_layers, every_n_layers: " +
        n + "}");
    return checkpoint_plan(config).checkpointed;
  };
  EXPECT_EQ(layers("1"), (std::vector{0, 1, 2, 3}));
  EXPECT_EQ(layers("2"), (std::vector{0, 2}));
  EXPECT_EQ(layers("3"), (std::vector{0, 3}));
  EXPECT_EQ(layers("100"), (std::vector{0}));
  EXPECT_EQ(layers("2"), (std::vector{0, 2}));
}

TEST(Config, KeepIsAListOfNamesOrOneByLayer) {
  const auto kept = [](const std::string& keep) {
    const Config config = parse(kData + "activation_checkpointing: {policy: selective, keep: " + keep + "}\n");
    EXPECT_EQ(to_yaml(parse(to_yaml(config))), to_yaml(config));
    std::vector<Marks> marks;
    for (const SavePlan& block : checkpoint_plan(config).blocks) marks.push_back(block.placed(Placement::Keep));
    return marks;
  };
  EXPECT_EQ(kept("[attn.out, qkv]"), std::vector<Marks>(6, {"attn.out", "attn.qkv"}));
  EXPECT_EQ(kept("['*.norm']"), std::vector<Marks>(6, {"attn.norm", "mlp.norm"}));
  EXPECT_EQ(kept("[{layers: [0, 5], keep: [mlp]}, {keep: [mid]}]"),
            (std::vector<Marks>{{"mlp.act", "mlp.up"}, {"mid"}, {"mid"}, {"mid"}, {"mid"}, {"mlp.act", "mlp.up"}}));
}

TEST(Config, OffloadIsOneWordSomeNamesOrASection) {
  const auto plan = [](const std::string& rest) {
    const Config config = parse(kData + "activation_checkpointing: {" + rest + "}\n");
    EXPECT_EQ(to_yaml(parse(to_yaml(config))), to_yaml(config));
    return checkpoint_plan(config);
  };
  EXPECT_EQ(plan("offload: none").offload_depth, 0);
  const CheckpointPlan all = plan("offload: all");  // policy full: the inputs are all there is
  EXPECT_EQ(all.offload_depth, 1);
  for (const SavePlan& block : all.blocks) EXPECT_EQ(block.inputs, Placement::Offload);
  const CheckpointPlan some = plan("policy: none, offload: [mlp.up, input]");
  EXPECT_EQ(some.blocks[0].placed(Placement::Offload), Marks{"mlp.up"});
  EXPECT_EQ(some.blocks[0].inputs, Placement::Offload);
  EXPECT_EQ(some.blocks[0].unmarked, Placement::Keep);
  const CheckpointPlan marks = plan("policy: selective, keep: [qkv, mid], offload: {marks: marks, depth: 3}");
  EXPECT_EQ(marks.blocks[0].placed(Placement::Offload), (Marks{"attn.qkv", "mid"}));
  EXPECT_EQ(marks.blocks[0].inputs, Placement::Keep);
  EXPECT_EQ(marks.offload_depth, 3);
  const CheckpointPlan half = plan("policy: none, offload: {marks: all, keep_last: 2, fraction: 0.5}");
  std::vector<bool> moved;
  for (const SavePlan& block : half.blocks) moved.push_back(block.unmarked == Placement::Offload);
  EXPECT_EQ(moved, (std::vector<bool>{false, true, false, true, false, false}));
}

TEST(Config, AllErrorsAreReportedAtOnce) {
  const Lines lines = refusals(
      "modle: {layers: 2}\ndata: {file: a}\ntrain: {steps: 2.5, seed: x}\nsharding: {resident_slots: 9}\n", {"a=1"});
  EXPECT_EQ(
      lines,
      (Lines{"c.yaml:1:1: modle: unknown section; did you mean model?",
             "c.yaml:2:8: data.file: unknown key; did you mean data.files?",
             "c.yaml:3:16: train.steps: value '2.5' is not an integer; allowed: an integer from 1 to 1000000000000",
             "c.yaml:3:27: train.seed: value 'x' is not an integer; allowed: an integer >= 0",
             "--set a=1: a: unknown key", "c.yaml: data.files: is missing; it has no default; allowed: a list of texts",
             "c.yaml:4:28: sharding.resident_slots: value 9 exceeds model.layers 6; allowed: an integer from 1 to 6"}));
}

TEST(Config, SetReplacesOneKey) {
  const Config config =
      parse(with_train("steps: 3"), {"train.steps=5", "train.optimizer.betas=[0.5, 0.6]", "output=runs/a b",
                                     "train.schedule={type: constant, warmup_steps: 7}", "model.dropout=.5"});
  EXPECT_EQ(config.train.steps, 5);
  EXPECT_EQ(config.train.optimizer.betas, (std::array<double, 2>{0.5, 0.6}));
  EXPECT_EQ(config.output, "runs/a b");
  EXPECT_EQ(config.train.schedule.type, ScheduleConfig::Type::Constant);
  EXPECT_EQ(config.train.schedule.warmup_steps, 7);
  EXPECT_EQ(config.model.dropout, 0.5F);
}

TEST(Config, SettingAKeyTwiceIsRefused) {
  EXPECT_EQ(refusal(kData, {"train.steps=5", "output=x", "train.steps=6"}),
            "--set train.steps=6: train.steps: given twice; first by --set train.steps=5");
  EXPECT_EQ(refusal(kData, {"eval={every: 1, batches: 2}", "eval.batches=3"}),
            "--set eval.batches=3: eval.batches: given twice; first by --set eval={every: 1, batches: 2}");
}

TEST(Config, AnErrorThatBeginsWithAKeyGetsThePlaceWhereItWasWritten) {
  const Config config = parse(with_train("steps: 3"), {"output=x"});
  const auto placed = [&](const std::string& message) {
    UsageError error(message);
    add_place(config, error);
    return std::string(error.what());
  };
  EXPECT_EQ(placed("train.steps: no"), "c.yaml:4:10: train.steps: no");
  EXPECT_EQ(placed("output: no"), "--set output=x: output: no");
  EXPECT_EQ(placed("model.frozen: no"), "c.yaml: model.frozen: no");
  EXPECT_EQ(placed("c.yaml:4:10: train.steps: no"), "c.yaml:4:10: train.steps: no");
  for (const std::string other : {"step 3: train.steps: no", "train: no", "rank 1 left: output: no", ""})
    EXPECT_EQ(placed(other), other);
}

TEST(Config, SetThatCannotBeUsedIsNamed) {
  EXPECT_EQ(refusal(kData, {"train.stesp=5"}),
            "--set train.stesp=5: train.stesp: unknown key; did you mean train.steps?");
  EXPECT_EQ(refusal(kData, {"train.steps"}),
            "--set train.steps: has no key and value; allowed: --set section.key=value");
  EXPECT_EQ(refusal(kData, {"=5"}), "--set =5: has no key and value; allowed: --set section.key=value");
  EXPECT_EQ(
      refusal(kData, {"train.steps="}),
      "--set train.steps=: train.steps: value null is not an integer; allowed: an integer from 1 to 1000000000000");
  EXPECT_EQ(refusal(kData, {"train.optimizer.betas=[1"}).find("--set train.optimizer.betas=[1: not valid YAML: "), 0U);
  EXPECT_EQ(refusal(kData, {"train=5"}),
            "--set train=5: train: is not a section; allowed: `key: value` lines, indented below it");
}

TEST(Config, SegmentsDefaultToTheRootOfTheLayers) {
  Config config = parse(kData + "activation_checkpointing: {policy: segments}\n");
  EXPECT_EQ(checkpoint_plan(config).segments.size(), 2U);
  config.activation_checkpointing.segments = 3;
  EXPECT_EQ(checkpoint_plan(config).segments.size(), 3U);
  EXPECT_EQ(checkpoint_plan(config).checkpointed.size(), 6U);
}

class ConfigFile : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(folder_ / "texts"); }
  std::filesystem::path write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name) << text;
    return folder_ / name;
  }
  std::string refused(const std::filesystem::path& file) {
    try {
      load_config(file);
    } catch (const UsageError& e) {
      return e.what();
    }
    return "";
  }
  const TemporaryFolder own_;
  const std::filesystem::path folder_ = own_.path();
};

TEST_F(ConfigFile, RelativeDataFilesAreBesideTheConfiguration) {
  write("texts/a.txt", "a");
  const Config config = load_config(write("c.yaml", "data: {files: [texts/../texts/a.txt, ./texts/a.txt]}\n"));
  const std::string absolute = std::filesystem::absolute(folder_ / "texts/a.txt").lexically_normal().string();
  EXPECT_EQ(config.data.files, (Lines{absolute, absolute}));
  EXPECT_EQ(load_config(write("d.yaml", to_yaml(config))).data.files, config.data.files);
}

TEST_F(ConfigFile, DataFilesThatAreNoFilesAreRefused) {
  const std::filesystem::path file = write("c.yaml", "data:\n  files: [nothing.txt, texts]\n");
  const std::string at = file.string() + ":2:10: data.files: value ";
  EXPECT_EQ(refused(file), at + "'nothing.txt': " + (folder_ / "nothing.txt").string() +
                               " does not exist; allowed: files to read as text\n" + at + "'texts': " +
                               (folder_ / "texts").string() + " is a folder; allowed: files to read as text");
}

TEST_F(ConfigFile, AConfigurationThatCannotBeReadIsRefused) {
  EXPECT_EQ(refused(folder_ / "no.yaml"), (folder_ / "no.yaml").string() + ": cannot be read: no such file");
  EXPECT_EQ(refused(folder_), folder_.string() + ": is a folder; allowed: a YAML file");
  const auto empty = write("empty.yaml", "");
  EXPECT_EQ(refused(empty), empty.string() + ": the configuration is empty");
}

TEST(ConfigModels, AProgramsOwnTypesAreAllowedAndBuilt) {
  ModelRegistry models = built_in_models();
  models.push_back({"mine", [](const ModelConfig& model) {
                      Model made;
                      made.max_sequence = model.kv_heads;
                      return made;
                    }});
  const std::string data = "data: {files: [a]}\n", mine = "model: {type: mine, kv_heads: 3}\n";
  const Config config = parse_config(data + mine, "c.yaml", {}, models);
  EXPECT_EQ(make_model(config.model).max_sequence, 3);
  EXPECT_EQ(parse_config(to_yaml(config), "c.yaml", {}, models).model.type, "mine");
  EXPECT_NE(help_on("model.type", models).find("allowed: gpt2, llama, mine\n"), std::string::npos);
  EXPECT_EQ(help_on("model.type").find("mine"), std::string::npos);
  EXPECT_THROW(parse_config(data + mine, "c.yaml"), UsageError);
  EXPECT_THROW(parse_config(data + "model: {type: mien}\n", "c.yaml", {}, models), UsageError);
}

}  // namespace
}  // namespace regather::testing
