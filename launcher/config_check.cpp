#include "launcher/config_check.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "dist/backend.h"

namespace regather {
namespace {

constexpr std::int64_t kByteValues = 256;

class Rules {
 public:
  Rules(const CheckContext& context, ConfigErrors& errors) : context_(context), errors_(errors) {}
  bool written(const std::string& path) const { return context_.places.of_key.contains(path); }
  // The rule's keys; the message is about the first of them that was written.
  template <class... Args>
  void refuse_if(bool wrong, std::initializer_list<std::string> paths, fmt::format_string<Args...> text,
                 Args&&... args) {
    if (!wrong ||
        std::any_of(paths.begin(), paths.end(), [&](const auto& path) { return context_.failed.contains(path); }))
      return;
    const auto first = std::find_if(paths.begin(), paths.end(), [&](const auto& path) { return written(path); });
    errors_.add(context_.places.of(first == paths.end() ? *paths.begin() : *first), *paths.begin(),
                fmt::format(text, std::forward<Args>(args)...));
  }

 private:
  const CheckContext& context_;
  ConfigErrors& errors_;
};

void check_model(const ModelSection& m, Rules& rules) {
  const std::int64_t below = m.hidden / m.heads * m.heads;
  rules.refuse_if(m.hidden % m.heads != 0, {"model.hidden", "model.heads"},
                  "value {} is not a multiple of model.heads {}; allowed: {}", m.hidden, m.heads,
                  below == 0 ? fmt::format("{}", m.heads) : fmt::format("{} or {}", below, below + m.heads));
  const bool llama = m.type == "llama", gpt2 = m.type == "gpt2";  // another type says itself what it cannot have
  rules.refuse_if(gpt2 && m.kv_heads != 0, {"model.kv_heads", "model.type"},
                  "value {} needs model.type llama; model.type is {}; allowed: 0", m.kv_heads, m.type);
  rules.refuse_if(gpt2 && m.rope_theta != ModelConfig().rope_theta, {"model.rope_theta", "model.type"},
                  "value {} needs model.type llama; model.type is {}; allowed: no such key", m.rope_theta, m.type);
  rules.refuse_if(llama && m.kv_heads > 0 && m.heads % m.kv_heads != 0, {"model.kv_heads", "model.heads"},
                  "value {} does not divide model.heads {}", m.kv_heads, m.heads);
  rules.refuse_if(llama && m.hidden % m.heads == 0 && m.hidden / m.heads % 2 != 0, {"model.hidden", "model.heads"},
                  "value {} gives heads of size {}; allowed: an even size, for rotary positions", m.hidden,
                  m.hidden / m.heads);
}

// A rank of 0 that was written turns adapters off, whatever else is said of them.
void check_lora(const LoraOptions& lora, Rules& rules) {
  const LoraOptions unset;
  const std::string rank = "model.lora.rank";
  if (lora.rank > 0 || rules.written(rank)) return;
  rules.refuse_if(lora.alpha != unset.alpha, {"model.lora.alpha", rank},
                  "value {} is of adapters, but model.lora.rank is 0; allowed: {}, or a model.lora.rank", lora.alpha,
                  unset.alpha);
  rules.refuse_if(lora.targets != unset.targets, {"model.lora.targets", rank},
                  "value [{}] is of adapters, but model.lora.rank is 0; allowed: [{}], or a model.lora.rank",
                  fmt::join(lora.targets, ", "), fmt::join(unset.targets, ", "));
}

void check_data(const Config& c, Rules& rules) {
  rules.refuse_if(c.data.tokenizer == "bytes" && c.model.vocab < kByteValues, {"model.vocab", "data.tokenizer"},
                  "value {} is less than the {} tokens of data.tokenizer bytes; allowed: auto, or an integer >= {}",
                  c.model.vocab, kByteValues, kByteValues);
  rules.refuse_if(c.data.sequence > c.model.max_sequence, {"data.sequence", "model.max_sequence"},
                  "value {} exceeds model.max_sequence {}; allowed: an integer from 1 to {}", c.data.sequence,
                  c.model.max_sequence, c.model.max_sequence);
  rules.refuse_if(c.data.files.empty(), {"data.files"}, "value [] names no file; allowed: one or more files");
}

void check_train(const TrainConfig& t, Rules& rules) {
  const std::int64_t of_rank = t.micro_batch * t.accumulation;
  rules.refuse_if(
      t.global_batch % of_rank != 0, {"train.global_batch", "train.micro_batch", "train.accumulation"},
      "value {} is not a multiple of micro_batch {} x accumulation {} = {}, so no number of ranks fits; allowed: 0 "
      "(derived), or a multiple of {}",
      t.global_batch, t.micro_batch, t.accumulation, of_rank, of_rank);
  const bool cosine = t.schedule.type == ScheduleConfig::Type::Cosine;
  rules.refuse_if(cosine && t.schedule.min_lr > t.optimizer.lr, {"train.schedule.min_lr", "train.optimizer.lr"},
                  "value {} exceeds train.optimizer.lr {}; allowed: a number from 0 to {}", t.schedule.min_lr,
                  t.optimizer.lr, t.optimizer.lr);
  rules.refuse_if(!cosine && t.schedule.min_lr != 0, {"train.schedule.min_lr", "train.schedule.type"},
                  "value {} is where train.schedule.type cosine ends, but the type is constant; allowed: 0, or type "
                  "cosine",
                  t.schedule.min_lr);
  rules.refuse_if(
      t.stop_after > t.steps, {"train.stop_after", "train.steps"},
      "value {} is after the last step of train.steps {}; allowed: 0 (after the last), or an integer from 1 "
      "to {}",
      t.stop_after, t.steps, t.steps);
  const OptimizerConfig unset;
  const bool sgd = t.optimizer.type == OptimizerConfig::Type::Sgd;
  const auto of_adamw = [&](const std::string& key, bool set, const std::string& value, const std::string& usual) {
    rules.refuse_if(sgd && set, {"train.optimizer." + key, "train.optimizer.type"},
                    "value {} is of train.optimizer.type adamw, but the type is sgd; allowed: {}, or type adamw", value,
                    usual);
  };
  const auto two = [](const std::array<double, 2>& betas) { return fmt::format("[{}]", fmt::join(betas, ", ")); };
  of_adamw("betas", t.optimizer.betas != unset.betas, two(t.optimizer.betas), two(unset.betas));
  of_adamw("eps", t.optimizer.eps != unset.eps, fmt::format("{}", t.optimizer.eps), fmt::format("{}", unset.eps));
}

void check_sharding(const Config& c, Rules& rules) {
  const ShardingConfig& s = c.sharding;
  const CheckpointingConfig& a = c.activation_checkpointing;
  const bool slots = s.strategy == ShardingConfig::Strategy::Full;  // else every rank has all blocks, always
  const std::int64_t usual = std::min(ShardingConfig().resident_slots, c.model.layers);
  rules.refuse_if(!slots && s.resident_slots != 0 && s.resident_slots != usual,
                  {"sharding.resident_slots", "sharding.strategy"},
                  "value {} is of sharding.strategy full: under the others every rank has all blocks; allowed: {}, or "
                  "strategy full",
                  s.resident_slots, usual);
  rules.refuse_if(!slots && s.prefetch, {"sharding.prefetch", "sharding.strategy"},
                  "value {} is of sharding.strategy full: under the others no block is gathered for its use; allowed: "
                  "auto, or strategy full",
                  s.prefetch.value_or(0));
  const bool planned = a.policy == "budget" && a.budget == 0;
  rules.refuse_if(
      s.resident_slots == 0 && !planned,
      {"sharding.resident_slots", "activation_checkpointing.policy", "activation_checkpointing.budget"},
      "value 0 leaves it to policy budget with activation_checkpointing.budget 0; allowed: an integer from 1 "
      "to {}",
      c.model.layers);
  if (s.resident_slots == 0) return;
  rules.refuse_if(s.resident_slots > c.model.layers, {"sharding.resident_slots", "model.layers"},
                  "value {} exceeds model.layers {}; allowed: an integer from 1 to {}", s.resident_slots,
                  c.model.layers, c.model.layers);
  rules.refuse_if(
      s.prefetch_blocks() > s.resident_slots - 1, {"sharding.prefetch", "sharding.resident_slots"},
      "value {} leaves no slot for the block in use; allowed: auto, or at most sharding.resident_slots - 1 = {}",
      s.prefetch_blocks(), s.resident_slots - 1);
}

// What a model marks is known by the model alone; one that cannot be made is refused elsewhere.
void check_marks(const Config& c, Rules& rules) {
  const std::string section = "activation_checkpointing.", policy = section + "policy";
  const CheckpointingConfig& a = c.activation_checkpointing;
  const auto names_none = [](const LayerNames& entry) { return entry.names.empty(); };
  rules.refuse_if(a.policy == "selective" && std::ranges::all_of(a.keep, names_none), {section + "keep", policy},
                  "names nothing to keep; allowed: names, or policy full");
  const std::vector<std::string>& moved = a.offload.marks;
  const auto alone = [&](const char* word) {
    return moved.size() != 1 && std::ranges::find(moved, word) != moved.end();
  };
  if (moved.empty() || alone("none") || alone("all") || alone("auto"))
    return rules.refuse_if(
        true, {section + "offload.marks"},
        "value [{}] is not one word or some names; allowed: none, all, marks, auto, or a list of names",
        fmt::join(moved, ", "));
  std::string wrong;
  try {
    checkpoint_plan(c);
  } catch (const Error& e) {
    wrong = e.what();
  }
  for (const auto& [key, path] : {std::pair{"keep", section + "keep"}, {"offload", section + "offload.marks"}}) {
    if (!wrong.starts_with(section + key + ": ")) continue;
    const bool unknown_to_offload = path != section + key && wrong.find("matches no mark") != std::string::npos;
    rules.refuse_if(true, {path, policy, "model.type", "model.layers"}, "{}{}",
                    wrong.substr(section.size() + std::string_view(key).size() + 2),
                    unknown_to_offload ? "; input, the block's; or instead of names none, all, marks or auto" : "");
  }
}

void check_offload(const OffloadConfig& o, Rules& rules) {
  const std::string section = "activation_checkpointing.offload.";
  const auto needs_marks = [&](const char* key, auto value, auto unset) {
    rules.refuse_if(!o.on() && value != unset, {section + key, section + "marks"},
                    "value {} needs {}marks, which is {}; allowed: {}", value, section, fmt::join(o.marks, ", "),
                    unset);
  };
  const OffloadConfig unset;
  needs_marks("depth", o.depth, unset.depth);
  needs_marks("keep_last", o.keep_last, unset.keep_last);
  needs_marks("fraction", o.fraction, unset.fraction);
}

void check_planned_offload(const Config& c, Rules& rules) {
  const CheckpointingConfig& a = c.activation_checkpointing;
  const std::string section = "activation_checkpointing.";
  rules.refuse_if(
      a.offload.planned() && a.policy != "budget", {section + "offload.marks", section + "policy"},
      "value auto is planned by policy budget; activation_checkpointing.policy is {}; allowed: policy budget, or "
      "offload none, all, marks, or a list of names",
      a.policy);
  rules.refuse_if(a.offload.on() && a.policy == "budget", {section + "offload.marks", section + "policy"},
                  "value {} is not what policy budget planned with; allowed: none, or auto, which it plans",
                  fmt::join(a.offload.marks, ", "));
  const bool one_at_a_time = c.train.accumulation_order == TrainConfig::AccumulationOrder::BatchMajor;
  rules.refuse_if(
      a.offload.on() && one_at_a_time && c.model.layers > 1 && a.offload.depth >= c.model.layers,
      {section + "offload.depth", "model.layers"},
      "value {} moves nothing in {} layers: it would have to be back before it has left; allowed: an integer "
      "from 1 to {}",
      a.offload.depth, c.model.layers, c.model.layers - 1);
  rules.refuse_if(a.offload.planned() && c.train.accumulation > 1 &&
                      c.train.accumulation_order == TrainConfig::AccumulationOrder::LayerMajor,
                  {section + "offload.marks", "train.accumulation_order"},
                  "value auto is planned for train.accumulation_order batch_major, not layer_major; allowed: none, "
                  "all, marks, or a list of names");
}

void check_checkpointing(const Config& c, Rules& rules) {
  const CheckpointingConfig& a = c.activation_checkpointing;
  const std::string layers = "activation_checkpointing.layers";
  rules.refuse_if(a.segments > c.model.layers, {"activation_checkpointing.segments", "model.layers"},
                  "value {} exceeds model.layers {}; allowed: 0 (round(sqrt(layers))), or an integer from 1 to {}",
                  a.segments, c.model.layers, c.model.layers);
  std::set<std::int64_t> seen;
  for (const std::int64_t layer : a.layers) {
    rules.refuse_if(layer >= c.model.layers, {layers, "model.layers"},
                    "value {} is not a layer of model.layers {}; allowed: an integer from 0 to {}", layer,
                    c.model.layers, c.model.layers - 1);
    rules.refuse_if(!seen.insert(layer).second, {layers}, "value {} is given twice", layer);
  }
  if (a.policy == "selective" || a.offload.on()) check_marks(c, rules);
  check_offload(a.offload, rules);
  check_planned_offload(c, rules);
  rules.refuse_if(a.policy == "layers" && a.layers.empty(), {layers, "activation_checkpointing.policy"},
                  "value [] names no layer for policy layers; allowed: indices from 0 to {}, or policy none",
                  c.model.layers - 1);
}

void check_budget(const Config& c, Rules& rules) {
  const CheckpointingConfig& a = c.activation_checkpointing;
  rules.refuse_if(a.policy == "budget" && a.budget == 0 && c.memory.limit == 0,
                  {"activation_checkpointing.budget", "activation_checkpointing.policy", "memory.limit"},
                  "value 0 needs memory.limit; allowed: activation bytes of a rank, or 0 and a memory.limit");
}

// The backends for ranks on such a device.
std::string backends_for(Config::Device device) {
  std::vector<std::string> names;
  for (const Backend& backend : backends())
    if ((backend.moves == Backend::Moves::Host) == (device == Config::Device::Cpu)) names.emplace_back(backend.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

void check_communication(const Config& config, Rules& rules) {
  const CommunicationConfig& c = config.communication;
  rules.refuse_if(config.device == Config::Device::Cpu && find_backend(c.backend).moves != Backend::Moves::Host,
                  {"communication.backend", "device"},
                  "value {} moves the memory of GPUs, but device is cpu; allowed: {}", c.backend,
                  backends_for(Config::Device::Cpu));
  rules.refuse_if(
      c.sim_ranks != 1 && c.backend != "sim", {"communication.sim_ranks", "communication.backend"},
      "value {} needs communication.backend sim; with mpi, mpirun says how many ranks there are; allowed: 1",
      c.sim_ranks);
}

}  // namespace

void check_contradictions(Config& config, const CheckContext& context, ConfigErrors& errors) {
  config.model.vocab = config.model.chosen_vocab.value_or(kByteValues);
  Rules rules(context, errors);
  check_model(config.model, rules);
  check_lora(config.model.lora, rules);
  check_data(config, rules);
  check_train(config.train, rules);
  check_sharding(config, rules);
  check_checkpointing(config, rules);
  check_budget(config, rules);
  check_communication(config, rules);
}

void refuse_unread_keys(const Config& config, std::span<const std::string> policies) {
  Config given = config, unset;
  const Keys keys = keys_of(given);
  Keys unset_keys = keys_of(unset);
  ConfigErrors errors;
  const std::string& own = config.activation_checkpointing.policy;  // whose keys may be there in any case
  for (const Key& key : keys.keys()) {
    if (key.policy.empty() || key.policy == own || std::ranges::find(policies, key.policy) != policies.end()) continue;
    const std::string value = write_key(key), usual = write_key(*unset_keys.find(key.path));
    if (value == usual) continue;
    errors.add(config.places.of(key.path), key.path,
               fmt::format("value {} is for policy {}, but {} {}; allowed: {}, or policy {}", value, key.policy,
                           policies.size() > 1       ? "the policies are"
                           : policies.front() == own ? "activation_checkpointing.policy is"
                                                     : "the policy is",
                           fmt::join(policies, ", "), usual, key.policy));
  }
  errors.throw_if_any();
}

void resolve_files(Config& config, const std::filesystem::path& folder, const CheckContext& context,
                   ConfigErrors& errors) {
  const std::string place = context.places.of("data.files");
  for (std::string& name : config.data.files) {
    const std::filesystem::path path = (folder / name).lexically_normal();
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error)) {
      const bool folder_instead = std::filesystem::is_directory(path, error);
      errors.add(place, "data.files",
                 fmt::format("value '{}': {} {}; allowed: files to read as text", name, path.string(),
                             folder_instead ? "is a folder" : "does not exist"));
    }
    name = path.string();
  }
}

std::int64_t global_batch(const Config& config, std::int64_t ranks) {
  return config.train.micro_batch * config.train.accumulation * ranks;
}

void check_against_world(const Config& config, std::int64_t ranks) {
  const CommunicationConfig& c = config.communication;
  if (config.device == Config::Device::Cuda && ranks > 1 && find_backend(c.backend).moves == Backend::Moves::Host) {
    const std::string several = backends_for(Config::Device::Cuda);
    throw UsageError(
        fmt::format("communication.backend: value {} moves the host's memory, but device is cuda and there are {} "
                    "ranks; allowed: {}",
                    c.backend, ranks, several.empty() ? "one rank" : several + ", or one rank"));
  }
  const TrainConfig& t = config.train;
  const std::int64_t actual = global_batch(config, ranks);
  if (t.global_batch == 0 || t.global_batch == actual) return;
  std::vector<std::string> fits = {fmt::format("global_batch {}", actual)};
  const auto offer = [&](std::string_view name, std::int64_t others) {
    if (t.global_batch % others == 0) fits.push_back(fmt::format("{} {}", name, t.global_batch / others));
  };
  offer("micro_batch", t.accumulation * ranks);
  offer("accumulation", t.micro_batch * ranks);
  offer("ranks", t.micro_batch * t.accumulation);
  throw UsageError(
      fmt::format("train.global_batch: value {} is not micro_batch {} x accumulation {} x ranks {} = {}; what fits: {}",
                  t.global_batch, t.micro_batch, t.accumulation, ranks, actual, fmt::join(fits, ", or ")));
}

}  // namespace regather
