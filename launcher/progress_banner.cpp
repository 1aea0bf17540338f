#include <sched.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <thread>

#include "ckpt/marks.h"
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

// "1 thread", "2 threads"
std::string counted(std::int64_t n, std::string_view what) {
  return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s");
}

// Ranks that are threads share the CPUs of their process, processes those of their machine; and a launcher may tie a
// rank to fewer CPUs than it has threads.
std::string warn_of_threads(const Config& config, const RunBanner& b) {
  const bool one_process = ranks_are_threads(config);
  if (!one_process && b.threads > b.cpus)
    return fmt::format(
        "  warning: the {} threads of a rank share {}: slower, same numbers; with mpirun, --bind-to none lets a rank "
        "use "
        "every CPU\n",
        b.threads, counted(b.cpus, "CPU"));
  const std::int64_t ranks = one_process ? b.ranks : b.ranks_here, cpus = std::max(b.cpus, b.cpus_here);
  if (ranks * b.threads <= cpus) return "";
  return fmt::format("  warning: {} of {} share {}: slower, same numbers\n", counted(ranks, "rank"),
                     counted(b.threads, "thread"), counted(cpus, "CPU"));
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

// What policy budget moves, with `offload: auto`: "; offloaded: input, mid in 0-3; mid in 4, 5".
std::string offloaded_by_plan(const CheckpointPlan& plan) {
  std::map<std::vector<std::string>, std::vector<int>> moved;
  for (std::size_t layer = 0; layer < plan.blocks.size(); ++layer) {
    std::vector<std::string> names = plan.blocks[layer].placed(Placement::Offload);
    if (plan.blocks[layer].inputs == Placement::Offload) names.emplace(names.begin(), kInput);
    if (!names.empty()) moved[std::move(names)].push_back(static_cast<int>(layer));
  }
  std::vector<std::string> parts;
  for (const auto& [names, layers] : moved)
    parts.push_back(fmt::format("{} in {}", fmt::join(names, ", "), ranges(layers)));
  return parts.empty() ? "; nothing is offloaded" : fmt::format("; offloaded: {}", fmt::join(parts, "; "));
}

}  // namespace

std::string describe_checkpointing(const Config& config) {
  const CheckpointingConfig& a = config.activation_checkpointing;
  const CheckpointPlan plan = checkpoint_plan(config);
  std::string text = a.policy;
  if (a.policy == "every_n_layers") text += fmt::format(" {}", a.every_n_layers);
  if (!plan.segments.empty()) text += fmt::format(" {}", plan.segments.size());
  text += plan.checkpointed.empty() ? ": all that is costly is kept"
                                    : fmt::format(": layers {} of {}", ranges(plan.checkpointed), config.model.layers);
  std::map<std::vector<std::string>, std::vector<int>> kept;  // which layers keep the same marks
  for (const int layer : plan.checkpointed) {
    const SavePlan& block = plan.blocks[static_cast<std::size_t>(layer)];
    std::vector<std::string> marks = block.placed(Placement::Keep);
    for (std::string& mark : block.placed(Placement::Offload)) marks.push_back(std::move(mark));
    std::ranges::sort(marks);
    kept[std::move(marks)].push_back(layer);
  }
  for (const auto& [marks, layers] : kept) {
    if (marks.empty()) continue;
    text += fmt::format("; {} kept", fmt::join(marks, ", "));
    if (kept.size() > 1) text += fmt::format(" in {}", ranges(layers));
  }
  if (a.offload.on()) text += fmt::format("; offloaded: {}", fmt::join(a.offload.marks, ", "));
  return a.offload.planned() ? text + offloaded_by_plan(plan) : text;
}

std::string describe_adapters(const LoraOptions& lora) {
  return fmt::format("rank {}, alpha {}, of {}; everything else is frozen", lora.rank, lora.alpha,
                     fmt::join(lora.targets, ", "));
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
  const std::string takes = fmt::format("gradients take {} a rank", take(config.train.reduce));
  if (config.train.accumulation == 1) return takes;  // both modes are the same
  const bool each = config.train.reduce == Reduce::EachMicroBatch;
  const std::string other = take(each ? Reduce::Once : Reduce::EachMicroBatch);
  return fmt::format("{}: {} ({}: {})", each ? "each_micro_batch" : "once", takes, each ? "once" : "each_micro_batch",
                     other == take(config.train.reduce) ? "the same" : other);
}

std::string describe_sharding(const Config& config) {
  const ShardingConfig& s = config.sharding;
  switch (s.strategy) {
    case ShardingConfig::Strategy::Full: break;
    case ShardingConfig::Strategy::Gradients:
      return "gradients: of gradients and optimizer state; each rank has all parameters";
    case ShardingConfig::Strategy::Optimizer:
      return "optimizer: of optimizer state; each rank has all parameters and gradients";
    case ShardingConfig::Strategy::None: return "none: each rank has everything (data parallel)";
  }
  return fmt::format("full, {}, prefetch {}", counted(s.resident_slots, "resident slot"), s.prefetch_blocks());
}

std::string warn_of_memory(std::int64_t peak, std::int64_t ranks, std::string_view there, std::int64_t available) {
  if (available == 0 || peak <= available / ranks) return "";
  return fmt::format("{} on {} need{} {} at the peak, it has {} available (memory.limit refuses instead)",
                     counted(ranks, "rank"), there, ranks == 1 ? "s" : "", human_bytes(peak * ranks),
                     human_bytes(available));
}

std::string start_banner(const Config& config, const RunBanner& b) {
  const ParameterCounts& p = b.parameters;
  std::string text = fmt::format("regather {}\n", REGATHER_VERSION);
  const auto line = [&](std::string_view name, const std::string& value) {
    text += fmt::format("  {:<14} {}\n", name, value);
  };
  line("ranks",
       fmt::format("{} ({}), {} each, {} allowed{}", b.ranks, config.communication.backend,
                   counted(b.threads, "thread"), counted(b.cpus, "CPU"), b.host.empty() ? "" : " on " + b.host));
  if (!b.device.empty()) line("device", b.device);
  line("model", fmt::format("{}, {}, {} parameters ({} trained)", config.model.type,
                            counted(config.model.layers, "layer"), p.all, p.trainable));
  if (config.model.lora.rank > 0) line("adapters", describe_adapters(config.model.lora));
  line("weight decay", fmt::format("{} with ({}), {} without ({})", counted(p.decay_tensors, "tensor"),
                                   counted(p.decay, "element"), p.no_decay_tensors, counted(p.no_decay, "element")));
  if (config.precision.element() == DType::BF16)
    line("precision", "bf16; what is trained, its gradients and their sums over ranks are fp32");
  line("batch", describe_batch(config, b.ranks));
  line("sharding", describe_sharding(config));
  line("checkpointing", describe_checkpointing(config));
  line("reduce", describe_reduce(config, p, b.ranks));
  if (!b.memory.empty()) line("memory", b.memory);
  if (!b.limits.empty()) line("limits", b.limits);
  line("output", config.output);
  if (!b.memory_warning.empty()) text += fmt::format("  warning: {}\n", b.memory_warning);
  return text + warn_of_threads(config, b);
}

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
  cpu_set_t set;
  CPU_ZERO(&set);
  const bool known = ::sched_getaffinity(0, sizeof(set), &set) == 0;
  for (int cpu = 0; known && cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  if (cpus.empty()) {  // more of them than the set can hold
    cpus.resize(std::max(1U, std::thread::hardware_concurrency()));
    std::iota(cpus.begin(), cpus.end(), 0);
  }
  return cpus;
}

std::string end_line(const RunSummary& s, RunEnd end, const std::filesystem::path& file) {
  std::string how_far = fmt::format("done: {}", counted(s.steps, "step"));
  if (s.steps < s.config.train.steps)
    how_far = fmt::format("stopped after step {} of {} ({})", s.steps, s.config.train.steps,
                          end == RunEnd::Signal ? "a signal" : "train.stop_after");
  if (s.skipped_steps > 0)
    how_far += fmt::format(", {} skipped as not finite",
                           s.skipped_steps == s.steps ? "all of them" : fmt::format("{} of them", s.skipped_steps));
  return fmt::format("{}, loss {:.4f}, {:.0f} tok/s, {} a rank at most; see {}", how_far,
                     without_sign_of_nan(s.loss.back()), s.tokens_per_second, human_bytes(s.memory.peak),
                     file.string());
}

}  // namespace regather
