#include "launcher/config_value.h"

#include "tests/launcher/config_text.h"

namespace regather::testing {
namespace {

TEST(ConfigValue, AWrongTypeIsRefusedWithTheExpectedOne) {
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

TEST(ConfigValue, AnItemOfAListIsRefusedForWhatItIs) {
  const std::string two = "; allowed: a list of two numbers, each >= 0 and < 1";
  EXPECT_EQ(refusal(with_train("optimizer: {betas: [0.9, x]}")),
            "c.yaml:4:28: train.optimizer.betas: value 'x' is not a number" + two);
  EXPECT_EQ(refusal(with_train("optimizer: {betas: [0.9, 1.5]}")),
            "c.yaml:4:28: train.optimizer.betas: value '1.5' is out of range" + two);
  EXPECT_EQ(refusal(with_checkpointing("layers: [1, two]")),
            "c.yaml:4:15: activation_checkpointing.layers: value 'two' is not an integer; allowed: a list of integers, "
            "each >= 0");
}

TEST(ConfigValue, AnUnknownChoiceIsRefusedWithTheNearestOne) {
  EXPECT_EQ(refusal(kData + "sharding:\n  strategy: ful\n"),
            "c.yaml:4:13: sharding.strategy: value 'ful' is not known; allowed: full, gradients, optimizer, none; did "
            "you mean full?");
  EXPECT_EQ(refusal(kData + "model: {type: bert}\n"),
            "c.yaml:3:15: model.type: value 'bert' is not known; allowed: gpt2, llama");
}

// What is not in this build is named as such, and never what a person may have meant.
TEST(ConfigValue, AnUnknownChoiceSaysWhatThisBuildDoesNotHave) {
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

TEST(ConfigValue, EveryNLayersTakesIntegersFromOne) {
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

TEST(ConfigValue, WhatThisBuildDoesNotHaveIsRefusedByName) {
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

TEST(ConfigValue, DefaultsOfWhatIsNotAvailableAreTaken) {
  EXPECT_NO_THROW(parse(kData + R"(
snapshot: {every: 0, keep: 2, async: true, resume: auto}
activation_checkpointing: {keep: [attn.out], budget: 0.5GiB, audit: 0}
sharding: {shard_size: 0}
precision: {compute: fp32, reduce: fp32}
)"));
  EXPECT_NO_THROW(parse(kData + "model: {lora: {rank: 0, alpha: 16, targets: [attn.qkv, attn.proj]}}\n"));
}

}  // namespace
}  // namespace regather::testing
