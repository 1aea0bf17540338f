#include <sched.h>

#include <algorithm>
#include <thread>

#include "launcher/config_value.h"
#include "launcher/progress.h"

namespace regather {
namespace {

// {0, 1, 2, 5} -> "0-2, 5"; two in a row stay apart.
std::string ranges(const std::vector<int>& numbers) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t end = i;
    while (end + 1 < numbers.size() && numbers[end + 1] == numbers[end] + 1) ++end;
    if (end < i + 2) end = i;
    parts.push_back(end > i ? fmt::format("{}-{}", numbers[i], numbers[end]) : fmt::format("{}", numbers[i]));
    i = end + 1;
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string spelled(const Config& config, std::string_view path) {
  Config copy = config;
  Keys keys = keys_of(copy);
  const Key* key = keys.find(path);
  check(key != nullptr, "no key {}", path);
  return write_key(*key);
}

constexpr std::int64_t kGradientBytes = 4;  // fp32

// Shards of the sum, and full-size gradients for as long as micro-batches are added up before they are reduced: of
// every unit, or in layer-major order of the one whose micro-batches are running. optimizer and none keep all of them
// anyway.
std::int64_t gradient_bytes(const Config& config, const ParameterCounts& p, std::int64_t ranks,
                            TrainConfig::Reduce reduce) {
  using Strategy = ShardingConfig::Strategy;
  const std::int64_t full = p.trainable * kGradientBytes, shard = (p.trainable + ranks - 1) / ranks * kGradientBytes;
  if (config.sharding.strategy == Strategy::None) return full;
  if (config.sharding.strategy == Strategy::Optimizer) return full + shard;
  if (config.train.accumulation == 1) return shard;
  const bool layer_major = config.train.accumulation_order == TrainConfig::AccumulationOrder::LayerMajor;
  if (layer_major) return shard + p.largest_block * kGradientBytes;
  return reduce == TrainConfig::Reduce::Once ? shard + full : shard;
}

}  // namespace

std::string describe_checkpointing(const Config& config) {
  const CheckpointingConfig& a = config.activation_checkpointing;
  const CheckpointPlan plan = checkpoint_plan(config);
  if (plan.checkpointed.empty()) return fmt::format("{}: every activation is kept", a.policy);
  std::string name = a.policy;
  if (name == "every_n_layers") name += fmt::format(" {}", a.every_n_layers);
  if (!plan.segments.empty()) name += fmt::format(" {}", plan.segments.size());
  return fmt::format("{}: layers {} of {}", name, ranges(plan.checkpointed), config.model.layers);
}

std::string describe_batch(const Config& config, std::int64_t ranks) {
  const std::int64_t sequences = global_batch(config, ranks);
  return fmt::format("micro_batch {} x accumulation {} x ranks {} = {} sequences, {} tokens a step",
                     config.train.micro_batch, config.train.accumulation, ranks, sequences,
                     sequences * config.data.sequence);
}

ParameterCounts parameter_counts(const Model& model) {
  ParameterCounts counts;
  for (const UnitSpec& unit : model.units) {
    std::int64_t trainable = 0;
    for (const ParamInfo& p : unit.params) {
      const std::int64_t n = p.shape.numel();
      counts.all += n;
      if (!p.trainable) continue;
      trainable += n;
      (p.decay ? counts.decay : counts.no_decay) += n;
      ++(p.decay ? counts.decay_tensors : counts.no_decay_tensors);
    }
    counts.trainable += trainable;
    counts.largest_block = std::max(counts.largest_block, trainable);
  }
  return counts;
}

std::string describe_reduce(const Config& config, const ParameterCounts& parameters, std::int64_t ranks) {
  using Reduce = TrainConfig::Reduce;
  const auto take = [&](Reduce reduce) { return human_bytes(gradient_bytes(config, parameters, ranks, reduce)); };
  const bool each = config.train.reduce == Reduce::EachMicroBatch;
  return fmt::format("{}: gradients take {} a rank ({}: {})", each ? "each_micro_batch" : "once",
                     take(config.train.reduce), each ? "once" : "each_micro_batch",
                     take(each ? Reduce::Once : Reduce::EachMicroBatch));
}

std::string start_banner(const Config& config, const RunBanner& b) {
  const ParameterCounts& p = b.parameters;
  std::string text = fmt::format("regather {}\n", REGATHER_VERSION);
  const auto line = [&](std::string_view name, const std::string& value) {
    text += fmt::format("  {:<14} {}\n", name, value);
  };
  line("ranks", fmt::format("{} ({}), {} thread{} each, {} CPU{} allowed{}", b.ranks,
                            spelled(config, "communication.backend"), b.threads, b.threads == 1 ? "" : "s", b.cpus,
                            b.cpus == 1 ? "" : "s", b.host.empty() ? "" : " on " + b.host));
  line("model", fmt::format("{}, {} layers, {} parameters ({} trained)", config.model.type, config.model.layers, p.all,
                            p.trainable));
  line("weight decay", fmt::format("{} tensors with ({} elements), {} without ({} elements)", p.decay_tensors, p.decay,
                                   p.no_decay_tensors, p.no_decay));
  line("batch", describe_batch(config, b.ranks));
  line("sharding", fmt::format("{}, {} resident slots, prefetch {}", spelled(config, "sharding.strategy"),
                               config.sharding.resident_slots, config.sharding.prefetch_blocks()));
  line("checkpointing", describe_checkpointing(config));
  line("reduce", describe_reduce(config, p, b.ranks));
  line("output", config.output);
  const bool threads_of_process = ranks_are_threads(config);
  const std::int64_t wanted = b.threads * (threads_of_process ? b.ranks : 1);
  if (wanted > b.cpus) {
    text += fmt::format(
        "  warning: {} threads share {} CPU{}: slower, same numbers; with mpirun, --bind-to none lets a rank use "
        "every CPU\n",
        wanted, b.cpus, b.cpus == 1 ? "" : "s");
  }
  return text;
}

std::int64_t allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1U, std::thread::hardware_concurrency());
}

}  // namespace regather
