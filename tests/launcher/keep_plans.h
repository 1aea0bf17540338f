// Plans of what small models keep, within budgets of activations or of all memory, at prices that are the same on every
// machine.
#pragma once
#include "launcher/keep_plan.h"
#include "tests/launcher/training_run.h"

namespace regather::testing {

// Every operation at a tenth of a nanosecond a flop or byte: prices that every machine has.
inline const CostModel kCosts(MachineLimits{1e10, 1e10});

inline Config config_of(const RunSetup& s) {
  Config c;
  static_cast<ModelConfig&>(c.model) = s.model;
  c.model.chosen_vocab = s.model.vocab;
  c.data.files = {"none"};
  c.data.tokenizer = "bytes";
  c.data.sequence = s.sequence;
  c.train.micro_batch = s.micro_batch;
  c.train.accumulation = s.plan.micro_batches;
  c.train.accumulation_order = s.plan.order == AccumulationOrder::LayerMajor
                                   ? TrainConfig::AccumulationOrder::LayerMajor
                                   : TrainConfig::AccumulationOrder::BatchMajor;
  c.train.reduce = s.plan.reduce == ReduceWhen::Once ? TrainConfig::Reduce::Once : TrainConfig::Reduce::EachMicroBatch;
  c.sharding.resident_slots = s.plan.slots;
  c.precision.compute = s.compute == DType::BF16 ? PrecisionConfig::Type::Bf16 : PrecisionConfig::Type::Fp32;
  c.activation_checkpointing.policy = "budget";
  validate(c);
  return c;
}

inline KeepPlan plan_within(const RunSetup& s, std::int64_t budget) {
  Config c = config_of(s);
  c.activation_checkpointing.budget = budget;
  return make_keep_plan(c, make_model(s.model), s.world, kCosts);
}
inline KeepPlan plan_within_all(const RunSetup& s, std::int64_t limit, int slots) {
  Config c = config_of(s);
  c.activation_checkpointing.budget = 0;
  c.memory.limit = limit;
  c.sharding.resident_slots = slots;
  return make_keep_plan(c, make_model(s.model), s.world, kCosts);
}

inline RunSetup under(const RunSetup& s, const KeepPlan& plan) {
  RunSetup planned = s;
  planned.policy = {.policy = "budget", .planned = plan.blocks};
  planned.plan.slots = plan.slots;
  return planned;
}

struct Range {
  std::int64_t least, most;
};
inline Range range_of(const RunSetup& s) {
  const KeepPlan all = explore_keep_plans(config_of(s), make_model(s.model), s.world, kCosts);
  return {all.frontier.front().bytes, all.frontier.back().bytes};
}

// Beside operations at 1e10 flops and bytes a second.
inline CostModel copying_at(double bytes_a_second) {
  return CostModel::from_json(fmt::format(
      R"({{"format": 1, "machine": "", "threads": 1, "ranks": 2, "limits": {{"flops": 1e10, "bytes": 1e10}},
          "seconds_a_wire_byte": 0, "overhead_an_operation": 0,
          "seconds_a_copied_byte": {{"to_host": {0}, "to_device": {0}}}, "operations": []}})",
      1 / bytes_a_second));
}

inline Config moving(const RunSetup& s, std::int64_t budget) {
  Config c = config_of(s);
  c.activation_checkpointing.offload.marks = {"auto"};
  c.activation_checkpointing.budget = budget;
  return c;
}

}  // namespace regather::testing
