#include "launcher/config_check.h"

#include "tests/launcher/config_text.h"

namespace regather::testing {
namespace {

TEST(ConfigCheck, RanksOnGpusNeedABackendThatMovesTheirMemory) {
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

TEST(ConfigCheck, BackendsOfGpusAreNotForACpu) {
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

TEST(ConfigCheck, KeepRefusesWhatTheModelDoesNotMark) {
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

TEST(ConfigCheck, OffloadRefusesWhatIsNotKept) {
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

TEST(ConfigCheck, ALinearLayerThatTheModelDoesNotHaveIsRefusedWithThoseThatItHas) {
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

TEST(ConfigCheck, ContradictionsNameBothValues) {
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

TEST(ConfigCheck, WhatWouldBeIgnoredIsRefusedWhereItWasWritten) {
  const auto refused = [](const std::string& rest, const std::string& line) { EXPECT_EQ(refusal(kData + rest), line); };
  refused("model: {lora: {alpha: 8}}\n",
          "c.yaml:3:23: model.lora.alpha: value 8 is of adapters, but model.lora.rank is 0; allowed: 16, or a "
          "model.lora.rank");
  refused(
      "model: {lora: {targets: [mlp.up]}}\n",
      "c.yaml:3:25: model.lora.targets: value [mlp.up] is of adapters, but model.lora.rank is 0; allowed: [attn.qkv, "
      "attn.proj], or a model.lora.rank");
  refused("train: {schedule: {type: constant, min_lr: 1e-5}}\n",
          "c.yaml:3:44: train.schedule.min_lr: value 1e-05 is where train.schedule.type cosine ends, but the type is "
          "constant; allowed: 0, or type cosine");
  refused(
      "train: {steps: 3, stop_after: 4}\n",
      "c.yaml:3:31: train.stop_after: value 4 is after the last step of train.steps 3; allowed: 0 (after the last), "
      "or an integer from 1 to 3");
  refused("train: {optimizer: {type: sgd, betas: [0.8, 0.9]}}\n",
          "c.yaml:3:39: train.optimizer.betas: value [0.8, 0.9] is of train.optimizer.type adamw, but the type is sgd; "
          "allowed: [0.9, 0.95], or type adamw");
  refused(
      "train: {optimizer: {type: sgd, eps: 1e-6}}\n",
      "c.yaml:3:37: train.optimizer.eps: value 1e-06 is of train.optimizer.type adamw, but the type is sgd; allowed: "
      "1e-08, or type adamw");
  for (const std::string strategy : {"none", "optimizer", "gradients"}) {
    refused(
        "sharding: {resident_slots: 3, strategy: " + strategy + "}\n",
        "c.yaml:3:28: sharding.resident_slots: value 3 is of sharding.strategy full: under the others every rank has "
        "all blocks; allowed: 2, or strategy full");
    refused(
        "sharding: {prefetch: 1, strategy: " + strategy + "}\n",
        "c.yaml:3:22: sharding.prefetch: value 1 is of sharding.strategy full: under the others no block is gathered "
        "for its use; allowed: auto, or strategy full");
  }
}

// Neither is it a contradiction to write a default, nor to turn off what the rest of a file is about.
TEST(ConfigCheck, DefaultsAndWhatIsTurnedOffAreNoContradictions) {
  for (const std::string rest :
       {"model: {lora: {rank: 0, alpha: 8, targets: [mlp.up]}}\n", "model: {lora: {alpha: 16}}\n",
        "train: {schedule: {type: constant, min_lr: 0}}\n", "train: {steps: 3, stop_after: 3}\n",
        "train: {optimizer: {type: sgd, betas: [0.9, 0.95], eps: 1e-8}}\n",
        "sharding: {strategy: none, resident_slots: 2, prefetch: auto}\n",
        "model: {layers: 1}\nsharding: {strategy: none, resident_slots: 1}\n"})
    EXPECT_EQ(to_yaml(parse(to_yaml(parse(kData + rest)))), to_yaml(parse(kData + rest))) << rest;
}

TEST(ConfigCheck, KeysThatNoneOfThePoliciesReadsAreRefusedTogether) {
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

TEST(ConfigCheck, KeysOfTheOwnPolicyMayStayWhenOthersAreCompared) {
  const Config config = parse(kData + "activation_checkpointing: {policy: selective, keep: [qkv, mid]}\n");
  const std::vector<std::string> others = {"none", "full"};
  EXPECT_NO_THROW(refuse_unread_keys(config, others));
}

TEST(ConfigCheck, AContradictionOfARefusedValueIsNotReported) {
  EXPECT_EQ(refusals(kData + "model: {layers: x}\nsharding: {resident_slots: 9}\n").size(), 1U);
}

TEST(ConfigCheck, GlobalBatchIsCheckedAgainstTheRanks) {
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

}  // namespace
}  // namespace regather::testing
