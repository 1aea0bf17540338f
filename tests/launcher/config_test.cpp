#include "launcher/config.h"

#include <gtest/gtest.h>

#include <fstream>

#include "launcher/config_value.h"
#include "tests/launcher/temporary_folder.h"

namespace regather {
namespace {

const std::string kData = "data:\n  files: [a.txt]\n";

Config parse(const std::string& text, std::vector<std::string> sets = {}) { return parse_config(text, "c.yaml", sets); }

// The lines of what a configuration is refused with; empty if it is taken.
std::vector<std::string> refusals(const std::string& text, std::vector<std::string> sets = {}) {
  try {
    parse(text, std::move(sets));
  } catch (const UsageError& e) {
    EXPECT_EQ(e.code(), ExitCode::Usage);
    std::vector<std::string> lines(1);
    for (const char* c = e.what(); *c != '\0'; ++c) {
      if (*c == '\n') {
        lines.emplace_back();
      } else {
        lines.back() += *c;
      }
    }
    return lines;
  }
  return {};
}
using Lines = std::vector<std::string>;

std::string refusal(const std::string& text, std::vector<std::string> sets = {}) {
  const Lines lines = refusals(text, std::move(sets));
  EXPECT_EQ(lines.size(), 1U) << ::testing::PrintToString(lines);
  return lines.empty() ? "" : lines[0];
}

std::string with_checkpointing(const std::string& key_value) {
  return kData + "activation_checkpointing:\n  " + key_value + "\n";
}
std::string with_train(const std::string& key_value) { return kData + "train:\n  " + key_value + "\n"; }

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
    betas: [0.8, 0.9]
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
  EXPECT_EQ(config.train.optimizer.betas, (std::array<double, 2>{0.8, 0.9}));
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

TEST(Config, AWrongTypeIsRefusedWithTheExpectedOne) {
  EXPECT_EQ(
      refusal(with_train("optimizer: {lr: \"1e-3\"}")),
      "c.yaml:4:19: train.optimizer.lr: value \"1e-3\" is text (it is quoted), not a number; allowed: a number >= 0");
  EXPECT_EQ(refusal(with_train("micro_batch: 2.0")),
            "c.yaml:4:16: train.micro_batch: value '2.0' is not an integer; allowed: an integer from 1 to 1048576");
  EXPECT_EQ(refusal(with_train("seed: 99999999999999999999")),
            "c.yaml:4:9: train.seed: value '99999999999999999999' is out of range (the largest integer is "
            "9223372036854775807); allowed: an integer >= 0");
  EXPECT_EQ(refusal(with_train("seed: -99999999999999999999")),
            "c.yaml:4:9: train.seed: value '-99999999999999999999' is out of range; allowed: an integer >= 0");
  EXPECT_EQ(refusal(kData + "memory: {limit: 99999999TiB}\n")
                .find("c.yaml:3:17: memory.limit: value '99999999TiB' is out of range ("),
            0U);
  EXPECT_EQ(refusal(with_train("clip_grad_norm: 1e999")),
            "c.yaml:4:19: train.clip_grad_norm: value '1e999' is out of range; allowed: a number >= 0");
  EXPECT_EQ(refusal(with_train("steps: [3]")).find("c.yaml:4:10: train.steps: value [3] is not an integer; "), 0U);
  EXPECT_EQ(refusal(with_train("steps: {a: 3}")).find("c.yaml:4:10: train.steps: value a section is not an integer; "),
            0U);
  EXPECT_EQ(refusal(kData + "model: {tie_embeddings: yes}\n"),
            "c.yaml:3:25: model.tie_embeddings: value 'yes' is not true or false; allowed: true or false");
  EXPECT_EQ(refusal("data: {files: a.txt}\n"),
            "c.yaml:1:15: data.files: value 'a.txt' is not a list of texts; allowed: a list of texts");
  EXPECT_EQ(refusal(with_train("optimizer: {betas: [0.9]}")),
            "c.yaml:4:22: train.optimizer.betas: value [0.9] is not a list of two numbers; allowed: a list of two "
            "numbers, each >= 0 and < 1");
  EXPECT_EQ(refusal(with_train("optimizer: {betas: [0.9, \"x\", [1]]}")).find("value [0.9, \"x\", [1]] is not a list "),
            36U);
  EXPECT_EQ(refusal(kData + "communication: {timeout: 60}\n"),
            "c.yaml:3:26: communication.timeout: value '60' is not a duration; allowed: a duration such as 500ms, 60s "
            "or 5min, from "
            "1ms to 24h");
  EXPECT_EQ(
      refusal(kData + "memory: {limit: 2GB}\n").find("c.yaml:3:17: memory.limit: value '2GB' is not a size in bytes; "),
      0U);
  EXPECT_EQ(refusal(kData + "output: \"\"\n"), "c.yaml:3:9: output: value \"\" is empty; allowed: text");
  for (const std::string bad : {"nan", ".nan", "inf", "-inf", "1e999", "0x10", "1,5", "1 2"}) {
    EXPECT_EQ(refusals(with_train("clip_grad_norm: " + bad)).size(), 1U) << bad;
  }
}

TEST(Config, AnItemOfAListIsRefusedForWhatItIs) {
  const std::string two = "; allowed: a list of two numbers, each >= 0 and < 1";
  EXPECT_EQ(refusal(with_train("optimizer: {betas: [0.9, x]}")),
            "c.yaml:4:28: train.optimizer.betas: value 'x' is not a number" + two);
  EXPECT_EQ(refusal(with_train("optimizer: {betas: [0.9, 1.5]}")),
            "c.yaml:4:28: train.optimizer.betas: value '1.5' is out of range" + two);
  EXPECT_EQ(refusal(with_checkpointing("layers: [1, two]")),
            "c.yaml:4:15: activation_checkpointing.layers: value 'two' is not an integer; allowed: a list of integers, "
            "each >= 0");
}

TEST(Config, AnUnknownChoiceIsRefusedWithTheNearestOne) {
  EXPECT_EQ(refusal(kData + "sharding:\n  strategy: ful\n"),
            "c.yaml:4:13: sharding.strategy: value 'ful' is not known; allowed: full, gradients, optimizer, none; did "
            "you mean full?");
  EXPECT_EQ(refusal(kData + "model: {type: bert}\n"),
            "c.yaml:3:15: model.type: value 'bert' is not known; allowed: gpt2, llama");
}

// What is not in this build is named as such, and never what a person may have meant.
TEST(Config, AnUnknownChoiceSaysWhatThisBuildDoesNotHave) {
  Config config;
  Keys keys = keys_of(config);
  for (const Key& key : keys.keys()) {
    const std::string missing = unavailable_options(key);
    if (missing.empty()) continue;
    const std::string near = missing.substr(0, missing.find(',')) + "x";
    const std::string line = refusal(kData, {key.path + "=" + near});
    EXPECT_NE(line.find("; not in this build: " + missing), std::string::npos) << line;
    const std::size_t hint = line.find("did you mean ");
    for (const KeyOption& option : key.options)
      EXPECT_TRUE(option.available || hint == std::string::npos || line.find(option.name, hint) > line.find('?'))
          << line;
  }
}

TEST(Config, EveryNLayersTakesIntegersFromOne) {
  const std::string allowed = "; allowed: an integer from 1 to 65536";
  const std::string place = "c.yaml:4:19: activation_checkpointing.every_n_layers: value ";
  EXPECT_EQ(refusal(with_checkpointing("every_n_layers: 0")), place + "'0' is out of range" + allowed);
  EXPECT_EQ(refusal(with_checkpointing("every_n_layers: -1")), place + "'-1' is out of range" + allowed);
  EXPECT_EQ(refusal(with_checkpointing("every_n_layers: 1.5")), place + "'1.5' is not an integer" + allowed);
  EXPECT_EQ(refusal(with_checkpointing("every_n_layers: \"two\"")),
            place + "\"two\" is text (it is quoted), not an integer" + allowed);
  EXPECT_EQ(refusal(with_checkpointing("every_n_layers: two")), place + "'two' is not an integer" + allowed);
  EXPECT_EQ(refusal(with_checkpointing("every_n_layers: null")), place + "null is not an integer" + allowed);
  EXPECT_EQ(refusal(with_checkpointing("every_n_layers:")).find("activation_checkpointing.every_n_layers: value null"),
            12U);
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

TEST(Config, WhatThisBuildDoesNotHaveIsRefusedByName) {
  const auto refused = [](const std::string& set, const std::string& allowed) {
    const std::string value = set.substr(set.find('=') + 1), path = set.substr(0, set.find('='));
    EXPECT_EQ(refusal(kData, {set}), "--set " + set + ": " + path + ": value '" + value +
                                         "' is not available in this build; allowed: " + allowed);
  };
  refused("sharding.shard_size=2", "0");
  refused("sharding.shard_size=1", "0");
  refused("snapshot.every=5", "0");
  refused("data.tokenizer=words.model", "bytes");
}

TEST(Config, RanksOnGpusNeedABackendThatMovesTheirMemory) {
  const Config config = parse(kData + "device: cuda\n");
  EXPECT_NO_THROW(check_against_world(config, 1));
  std::string refused;
  try {
    with_places(config, [&] { check_against_world(config, 2); });
  } catch (const UsageError& e) {
    refused = e.what();
  }
  EXPECT_TRUE(
      refused.find("communication.backend: value mpi moves the host's memory, but device is cuda and there are 2 "
                   "ranks; allowed: nccl, staged, or one rank") != std::string::npos)
      << refused;
}

TEST(Config, BackendsOfGpusAreNotForACpu) {
  for (const char* backend : {"nccl", "staged"}) {
    EXPECT_NO_THROW(check_against_world(parse(kData + "device: cuda\ncommunication: {backend: " + backend + "}\n"), 2));
    const std::string set = fmt::format("communication.backend={}", backend);
    EXPECT_EQ(
        refusal(kData, {set}),
        fmt::format("--set {}: communication.backend: value {} moves the memory of GPUs, but device is cpu; allowed: "
                    "mpi, sim",
                    set, backend));
  }
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

TEST(Config, KeepRefusesWhatTheModelDoesNotMark) {
  const auto refused = [](const std::string& keep, const std::string& rest) {
    EXPECT_EQ(refusal(kData + "activation_checkpointing: {policy: selective, keep: " + keep + "}\n"),
              "c.yaml:3:53: activation_checkpointing.keep: " + rest);
  };
  refused("[attn.out, mlp.upp]",
          "'mlp.upp' matches no mark of this model; allowed: its marks attn.norm, attn.qkv, attn.core, attn.out, mid, "
          "mlp.norm, mlp.up, mlp.act, mlp.down, the part of one after its last dot, a pattern with *, or a level "
          "(norms, attention_core, mlp)");
  refused("[{layers: [6], keep: [mid]}]", "layer 6 is out of range; allowed: 0 to 5");
  refused("[]", "names nothing to keep; allowed: names, or policy full");
  const std::string types = "; allowed: a list of texts, or of {layers, keep} by layer";
  refused("attn.out", "value 'attn.out' is not a list of texts, or of {layers, keep} by layer" + types);
  EXPECT_EQ(refusals(kData + "activation_checkpointing: {keep: [{layers: [0]}, {layer: [1], keep: [mid]}]}\n"),
            (Lines{"c.yaml:3:35: activation_checkpointing.keep: value a section has no keep" + types,
                   "c.yaml:3:51: activation_checkpointing.keep: value 'layer' is not a key of an entry" + types}));
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

TEST(Config, OffloadRefusesWhatIsNotKept) {
  const auto refused = [](const std::string& offload, const std::string& line) {
    EXPECT_EQ(refusal(kData + "activation_checkpointing: {offload: " + offload + "}\n"), line);
  };
  const std::string at = "c.yaml:3:37: activation_checkpointing.offload.marks: ";
  refused("[mlp.up]", at + "policy full keeps no value that 'mlp.up' stands for, so none can be offloaded; allowed: "
                           "all, input, or names of what it keeps");
  refused("marks", at + "policy full keeps no value that 'marks' stands for, so none can be offloaded; allowed: all, "
                        "input, or names of what it keeps");
  refused("[all, mid]",
          at + "value [all, mid] is not one word or some names; allowed: none, all, marks, auto, or a list of names");
  refused("[]", at + "value [] is not one word or some names; allowed: none, all, marks, auto, or a list of names");
  refused("auto", at + "value auto is planned by policy budget; activation_checkpointing.policy is full; allowed: "
                       "policy budget, or offload none, all, marks, or a list of names");
  EXPECT_NE(refusal(kData + "activation_checkpointing: {policy: budget, budget: 1MiB, offload: [qkv]}\n")
                .find("value qkv is not what policy budget planned with; allowed: none, or auto, which it plans"),
            std::string::npos);
  EXPECT_EQ(parse(kData + "activation_checkpointing: {policy: budget, offload: auto}\n")
                .activation_checkpointing.offload.marks,
            std::vector<std::string>{"auto"});
  const std::string unknown = refusal(kData + "activation_checkpointing: {offload: mpl.up}\n");
  EXPECT_TRUE(unknown.starts_with(at + "'mpl.up' matches no mark")) << unknown;
  EXPECT_TRUE(unknown.ends_with("; input, the block's; or instead of names none, all, marks or auto")) << unknown;
}

TEST(Config, DefaultsOfWhatIsNotAvailableAreTaken) {
  EXPECT_NO_THROW(parse(kData + R"(
snapshot: {every: 0, keep: 2, async: true, resume: auto}
activation_checkpointing: {keep: [attn.out], budget: 0.5GiB, audit: 0}
sharding: {shard_size: 0}
precision: {compute: fp32, reduce: fp32}
)"));
  EXPECT_NO_THROW(parse(kData + "model: {lora: {rank: 0, alpha: 16, targets: [attn.qkv, attn.proj]}}\n"));
}

TEST(Config, ALinearLayerThatTheModelDoesNotHaveIsRefusedWithThoseThatItHas) {
  const auto with = [](const std::string& model, const std::vector<std::string>& sets = {}) -> std::string {
    const Config config = parse_config(kData + "model:\n  " + model + "\n", "c.yaml", sets);
    try {
      with_places(config, [&] { return make_model(config.model); });
    } catch (const UsageError& e) {
      return e.what();
    }
    return "accepted";
  };
  EXPECT_EQ(with("lora: {rank: 4, targets: [attn.q_proj]}"),
            "c.yaml:4:28: model.lora.targets: value 'attn.q_proj' is no linear layer of this model; allowed: attn.qkv, "
            "attn.proj, mlp.up, mlp.down, or patterns of them with *");
  EXPECT_EQ(with("type: llama\n  lora: {rank: 4, targets: [attn.q, head]}"),
            "c.yaml:5:28: model.lora.targets: value 'head' is no linear layer of this model; allowed: attn.q, attn.k, "
            "attn.v, attn.proj, mlp.gate, mlp.up, mlp.down, attn.qkv, or patterns of them with *");
  EXPECT_NE(with("lora: {rank: 4, targets: []}").find("names no linear layer; allowed: attn.qkv"), std::string::npos);
  EXPECT_EQ(with("layers: 2", {"model.lora.rank=2", "model.lora.targets=[mpl.*]"}).substr(0, 63),
            "--set model.lora.targets=[mpl.*]: model.lora.targets: value 'mp");
  EXPECT_EQ(with("lora: {rank: 2, targets: [attn.*, mlp.up]}"), "accepted");
  EXPECT_EQ(with("type: llama\n  lora: {rank: 2}"), "accepted");
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

TEST(Config, ContradictionsNameBothValues) {
  const auto refused = [](const std::string& rest, const std::string& line) { EXPECT_EQ(refusal(kData + rest), line); };
  refused("model: {hidden: 100, heads: 6}\n",
          "c.yaml:3:17: model.hidden: value 100 is not a multiple of model.heads 6; allowed: 96 or 102");
  refused("model: {max_sequence: 128}\n",
          "c.yaml:3:23: data.sequence: value 256 exceeds model.max_sequence 128; allowed: an integer from 1 to 128");
  refused("model: {vocab: 100}\n",
          "c.yaml:3:16: model.vocab: value 100 is less than the 256 tokens of data.tokenizer bytes; allowed: auto, or "
          "an integer >= 256");
  refused("model: {kv_heads: 2}\n",
          "c.yaml:3:19: model.kv_heads: value 2 needs model.type llama; model.type is gpt2; allowed: 0");
  refused("model: {type: llama, kv_heads: 4}\n", "c.yaml:3:32: model.kv_heads: value 4 does not divide model.heads 6");
  refused("model: {type: llama, hidden: 18}\n",
          "c.yaml:3:30: model.hidden: value 18 gives heads of size 3; allowed: an even size, for rotary positions");
  refused("sharding: {resident_slots: 7}\n",
          "c.yaml:3:28: sharding.resident_slots: value 7 exceeds model.layers 6; allowed: an integer from 1 to 6");
  refused("sharding: {prefetch: 2}\n",
          "c.yaml:3:22: sharding.prefetch: value 2 leaves no slot for the block in use; allowed: auto, or at most "
          "sharding.resident_slots - 1 = 1");
  refused("sharding: {resident_slots: 0}\n",
          "c.yaml:3:28: sharding.resident_slots: value 0 leaves it to policy budget with "
          "activation_checkpointing.budget 0; allowed: an integer from 1 to 6");
  refused(
      "activation_checkpointing: {policy: budget, budget: 0}\n",
      "c.yaml:3:52: activation_checkpointing.budget: value 0 needs memory.limit; allowed: activation bytes of a rank, "
      "or 0 and a memory.limit");
  refused("activation_checkpointing: {offload: {depth: 3}}\n",
          "c.yaml:3:45: activation_checkpointing.offload.depth: value 3 needs activation_checkpointing.offload.marks, "
          "which is none; allowed: 1");
  refused("activation_checkpointing: {segments: 7}\n",
          "c.yaml:3:38: activation_checkpointing.segments: value 7 exceeds model.layers 6; allowed: 0 "
          "(round(sqrt(layers))), or an "
          "integer from 1 to 6");
  refused("activation_checkpointing: {layers: [6]}\n",
          "c.yaml:3:36: activation_checkpointing.layers: value 6 is not a layer of model.layers 6; allowed: an integer "
          "from 0 to 5");
  refused("activation_checkpointing: {layers: [1, 1]}\n",
          "c.yaml:3:36: activation_checkpointing.layers: value 1 is given twice");
  refused("activation_checkpointing: {policy: layers}\n",
          "c.yaml:3:36: activation_checkpointing.layers: value [] names no layer for policy layers; allowed: indices "
          "from 0 to 5, or "
          "policy none");
  refused("train: {global_batch: 6}\n",
          "c.yaml:3:23: train.global_batch: value 6 is not a multiple of micro_batch 4 x accumulation 1 = 4, so no "
          "number of ranks "
          "fits; allowed: 0 (derived), or a multiple of 4");
  refused("train: {schedule: {min_lr: 1}}\n",
          "c.yaml:3:28: train.schedule.min_lr: value 1 exceeds train.optimizer.lr 0.0003; allowed: a number from 0 to "
          "0.0003");
  refused("activation_checkpointing: {offload: {marks: all, depth: 6}}\n",
          "c.yaml:3:57: activation_checkpointing.offload.depth: value 6 moves nothing in 6 layers: it would have to be "
          "back "
          "before it has left; allowed: an integer from 1 to 5");
  refused("communication: {sim_ranks: 2}\n",
          "c.yaml:3:28: communication.sim_ranks: value 2 needs communication.backend sim; with mpi, mpirun says how "
          "many ranks there "
          "are; allowed: 1");
}

TEST(Config, KeysThatNoneOfThePoliciesReadsAreRefusedTogether) {
  const Config config = parse(kData + "activation_checkpointing:\n  every_n_layers: 3\n  layers: [1]\n  segments: 0\n");
  const auto refused = [&](std::vector<std::string> policies) {
    try {
      refuse_unread_keys(config, policies);
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const std::string layers =
      "c.yaml:5:11: activation_checkpointing.layers: value [1] is for policy layers, but the policies are full, "
      "every_n_layers; allowed: [], or policy layers";
  EXPECT_EQ(refused({"full", "every_n_layers"}), layers);
  EXPECT_EQ(refused({"layers", "every_n_layers"}), "");
  EXPECT_EQ(
      refused({"none"}).substr(0, 120),
      "c.yaml:4:19: activation_checkpointing.every_n_layers: value 3 is for policy every_n_layers, but the policy is "
      "none; allo");
  EXPECT_EQ(refused({"full"}),
            "c.yaml:4:19: activation_checkpointing.every_n_layers: value 3 is for policy every_n_layers, but "
            "activation_checkpointing.policy is full; allowed: 2, or policy every_n_layers\n"
            "c.yaml:5:11: activation_checkpointing.layers: value [1] is for policy layers, but "
            "activation_checkpointing.policy is full; allowed: [], or policy layers");
}

TEST(Config, KeysOfTheOwnPolicyMayStayWhenOthersAreCompared) {
  const Config config = parse(kData + "activation_checkpointing: {policy: selective, keep: [qkv, mid]}\n");
  const std::vector<std::string> others = {"none", "full"};
  EXPECT_NO_THROW(refuse_unread_keys(config, others));
}

TEST(Config, AContradictionOfARefusedValueIsNotReported) {
  EXPECT_EQ(refusals(kData + "model: {layers: x}\nsharding: {resident_slots: 9}\n").size(), 1U);
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

TEST(Config, GlobalBatchIsCheckedAgainstTheRanks) {
  const auto config = [](const std::string& train) { return parse(kData + "train: " + train + "\n"); };
  const auto message = [](const Config& c, std::int64_t ranks) -> std::string {
    try {
      check_against_world(c, ranks);
    } catch (const UsageError& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(message(config("{global_batch: 8, micro_batch: 2, accumulation: 2}"), 2), "");
  EXPECT_EQ(message(config("{micro_batch: 3, accumulation: 2}"), 2), "");
  EXPECT_EQ(global_batch(config("{micro_batch: 3, accumulation: 2}"), 2), 12);
  EXPECT_EQ(message(config("{global_batch: 24, micro_batch: 3, accumulation: 2}"), 2),
            "train.global_batch: value 24 is not micro_batch 3 x accumulation 2 x ranks 2 = 12; what fits: "
            "global_batch 12, or "
            "micro_batch 6, or accumulation 4, or ranks 4");
  EXPECT_EQ(
      message(config("{global_batch: 8, micro_batch: 2, accumulation: 1}"), 1),
      "train.global_batch: value 8 is not micro_batch 2 x accumulation 1 x ranks 1 = 2; what fits: global_batch 2, or "
      "micro_batch 8, or accumulation 4, or ranks 4");
  EXPECT_EQ(message(config("{global_batch: 8, micro_batch: 2, accumulation: 1}"), 3),
            "train.global_batch: value 8 is not micro_batch 2 x accumulation 1 x ranks 3 = 6; what fits: global_batch "
            "6, or ranks 4");
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
  const testing::TemporaryFolder own_;
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

TEST(ConfigHelp, DescribesAKeyASectionAndAll) {
  EXPECT_EQ(
      help_on("sharding.resident_slots"),
      "sharding.resident_slots\n  full blocks D that a rank holds at a time; 0: as many as pay, with policy budget and "
      "its budget 0\n  default: 2\n  allowed: an integer from 0 to 65536\n");
  EXPECT_NE(
      help_on("activation_checkpointing.policy").find("\n    full            every block keeps its input only and "),
      std::string::npos);
  EXPECT_NE(help_on("precision.compute").find("allowed: fp32, bf16"), std::string::npos);
  EXPECT_NE(help_on("snapshot.every").find("allowed: 0 (others are not available in this build)"), std::string::npos);
  EXPECT_EQ(help_on("eval").find("eval.every"), 0U);
  EXPECT_NE(help_on("eval").find("\n    evaluate after every so many steps; 0: never\n"), std::string::npos);
  EXPECT_NE(help_on("").find("model.layers"), std::string::npos);
  EXPECT_THROW(help_on("model.layer"), UsageError);
}

TEST(ConfigHelp, TheDocumentationIsUpToDate) {
  std::ifstream stream(REGATHER_SOURCE_DIR "/docs/configuration.md");
  const std::string text((std::istreambuf_iterator<char>(stream)), {});
  EXPECT_EQ(text, configuration_markdown()) << "run: regather help --markdown > docs/configuration.md";
}

TEST(ConfigHelp, EveryKeyIsDescribedInALine) {
  Config config;
  Keys keys = keys_of(config);
  EXPECT_GT(keys.keys().size(), 60U);
  for (const Key& key : keys.keys()) {
    EXPECT_FALSE(key.doc.empty()) << key.path;
    EXPECT_EQ(key.doc.find('\n'), std::string::npos) << key.path;
    EXPECT_EQ(keys.find(key.path), &key) << key.path << " is described twice";
  }
}

}  // namespace
}  // namespace regather
