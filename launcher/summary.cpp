#include "launcher/summary.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "ckpt/marks.h"
#include "launcher/adapter_file.h"
#include "launcher/config_value.h"
#include "launcher/report_parts.h"

namespace regather {
namespace {

using Json = nlohmann::ordered_json;

Json bytes_by_tag(const BytesByTag& bytes) {
  Json json = Json::object();
  for (const Tag tag : kAllTags) {
    if (tag != Tag::Host) json[std::string(name_of(tag))] = bytes[index(tag)];
  }
  return json;
}

Json seconds(const SecondsSummary& s) { return {{"min", s.min}, {"median", s.median}, {"max", s.max}}; }

Json value_of(const Key& key) {
  return std::visit(
      [&](const auto& target) -> Json {
        using T = std::decay_t<decltype(target)>;
        if constexpr (std::is_same_v<T, ByteTarget>) {
          return *target.value;
        } else if constexpr (std::is_same_v<T, ChoiceTarget> || std::is_same_v<T, std::chrono::milliseconds*>) {
          return write_key(key);
        } else if constexpr (std::is_same_v<T, std::optional<std::int64_t>*>) {
          return *target ? Json(**target) : Json("auto");
        } else if constexpr (std::is_same_v<T, float*>) {
          return Json::parse(write_key(key));  // the shortest text that is this float, not the float as a double
        } else if constexpr (std::is_same_v<T, std::vector<LayerNames>*>) {
          if (target->size() == 1 && target->front().layers.empty()) return target->front().names;
          Json entries = Json::array();
          for (const LayerNames& e : *target) entries.push_back({{"layers", e.layers}, {"keep", e.names}});
          return entries;
        } else {
          return *target;
        }
      },
      key.target);
}

Json config_json(const Config& config) {
  Config copy = config;
  Keys keys = keys_of(copy);
  Json json = Json::object();
  for (const Key& key : keys.keys()) {
    Json* place = &json;
    std::string_view rest = key.path;
    for (std::size_t dot; (dot = rest.find('.')) != std::string_view::npos; rest.remove_prefix(dot + 1)) {
      place = &(*place)[std::string(rest.substr(0, dot))];
    }
    (*place)[std::string(rest)] = value_of(key);
  }
  return json;
}

Json collectives(const RunSummary& s) {
  return {{"per_step", Json::parse(collectives_json(s.collectives_per_step))},
          {"expected_matches", s.expected_matches}};
}

Json evaluations(const RunSummary& s) {
  Json all = Json::array();
  for (const EvalMetrics& e : s.evaluations)
    all.push_back({{"step", e.step}, {"loss", e.loss}, {"seconds", e.seconds}});
  return all;
}

Json checkpointing(const RunSummary& s) {
  Json plan = Json::array();
  for (const LayerPlan& layer : s.checkpointing.plan) {
    plan.push_back({{"layer", layer.layer},
                    {"checkpointed", layer.checkpointed},
                    {"keep", layer.keep},
                    {"offload", layer.offload}});
  }
  const Json config = config_json(s.config);
  return {{"policy", config["activation_checkpointing"]["policy"]},
          {"recomputed_flops", s.checkpointing.recomputed_flops},
          {"forward_flops", s.checkpointing.forward_flops},
          {"hidden_seconds", s.checkpointing.hidden_seconds},
          {"offload",
           {{"bytes", s.checkpointing.offload.bytes},
            {"host_bytes", s.checkpointing.offload.host_bytes},
            {"to_host_gb_per_second", s.checkpointing.offload.to_host},
            {"to_device_gb_per_second", s.checkpointing.offload.to_device},
            {"stalled_milliseconds", s.checkpointing.offload.stalled_milliseconds}}},
          {"plan", plan}};
}

bool written_by_a_run(const std::string& name) {
  const bool events = name.starts_with(RunFolder::kEventsPrefix) && name.ends_with(RunFolder::kEventsSuffix);
  static constexpr std::array kWhole = {RunFolder::kConfig,         RunFolder::kSummary,       RunFolder::kMetrics,
                                        RunFolder::kProfile,        RunFolder::kTrace,         RunFolder::kComparison,
                                        RunFolder::kComparisonJson, RunFolder::kMemoryPicture, RunFolder::kTimePicture};
  return events || std::ranges::find(kWhole, name) != kWhole.end();
}

// Files of an earlier run that are in a folder of their own; the folder, if nothing else is in it.
void remove_adapter(const std::filesystem::path& folder, std::error_code& error) {
  for (const std::string_view name : {kAdapterModel, kAdapterConfig}) {
    std::filesystem::remove(folder / name, error);
    if (error) return;
  }
  if (std::filesystem::is_empty(folder, error)) std::filesystem::remove(folder, error);
}

[[noreturn]] void refuse_folder(const std::filesystem::path& folder, std::string_view why) {
  throw UsageError(fmt::format("output: value '{}' {}", folder.string(), why));
}

std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder) {
  std::error_code error;
  std::vector<std::filesystem::path> entries;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) entries.push_back(entry.path());
  if (error) refuse_folder(folder, fmt::format("cannot be read: {}", error.message()));
  return entries;
}

[[noreturn]] void fail(const std::filesystem::path& file, std::string_view what) {
  throw Error(fmt::format("{}: {}: {}", file.string(), what, std::strerror(errno)));
}

}  // namespace

SecondsSummary summarize_seconds(std::span<const double> seconds_of_steps) {
  if (seconds_of_steps.empty()) return {};
  std::vector<double> sorted(seconds_of_steps.begin(), seconds_of_steps.end());
  std::sort(sorted.begin(), sorted.end());
  const std::size_t n = sorted.size();
  return {sorted.front(), (sorted[(n - 1) / 2] + sorted[n / 2]) / 2, sorted.back()};
}

std::vector<LayerPlan> plan_of_layers(const Config& config) {
  const CheckpointPlan checkpoint = checkpoint_plan(config);
  std::vector<LayerPlan> plan;
  for (std::size_t layer = 0; layer < checkpoint.blocks.size(); ++layer) {
    LayerPlan& row = plan.emplace_back();
    row.layer = static_cast<std::int64_t>(layer);
    row.checkpointed = std::ranges::binary_search(checkpoint.checkpointed, static_cast<int>(layer));
    const SavePlan& block = checkpoint.blocks[layer];
    row.keep = block.placed(Placement::Keep);
    row.offload = block.placed(Placement::Offload);
    if (block.inputs == Placement::Offload) row.offload.emplace(row.offload.begin(), kInput);
    if (block.unmarked == Placement::Offload) row.offload.emplace_back("unmarked");
  }
  return plan;
}

std::string to_json(const RunSummary& s) {
  const MemorySummary& m = s.memory;
  const Json json = {{"config", config_json(s.config)},
                     {"world", s.world},
                     {"device", s.device},
                     {"steps", s.steps},
                     {"skipped_steps", s.skipped_steps},
                     {"tokens_per_second", s.tokens_per_second},
                     {"step_seconds", seconds(s.step_seconds)},
                     {"loss", s.loss},
                     {"grad_norm", s.grad_norm},
                     {"memory_bytes",
                      {{"peak", m.peak},
                       {"at_peak", bytes_by_tag(m.at_peak)},
                       {"peak_of", bytes_by_tag(m.peak_of)},
                       {"peak_rss", m.peak_rss},
                       {"baseline_rss", m.baseline_rss}}},
                     {"collectives", collectives(s)},
                     {"checkpointing", checkpointing(s)},
                     {"predicted",
                      {{"peak_bytes", s.predicted.peak_bytes},
                       {"step_seconds", s.predicted.step_seconds},
                       {"bytes_on_wire", s.predicted.bytes_on_wire}}},
                     {"eval", evaluations(s)}};
  return json.dump(2) + "\n";
}

std::string to_json(const Config& config) { return config_json(config).dump(2) + "\n"; }

RunFolder::RunFolder(std::filesystem::path folder, Existing existing) : folder_(std::move(folder)) {
  require_usable(folder_, existing);
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error) refuse_folder(folder_, fmt::format("cannot be made: {}", error.message()));
  for (const auto& file : entries_of(folder_)) {
    const std::string name = file.filename().string();
    if (written_by_a_run(name)) std::filesystem::remove(file, error);
    if (name == kAdapter && std::filesystem::is_directory(file)) remove_adapter(file, error);
    if (error) refuse_folder(folder_, fmt::format("holds {}, which cannot be removed: {}", name, error.message()));
  }
}

void RunFolder::require_usable(const std::filesystem::path& folder, Existing existing) {
  std::error_code error;
  std::filesystem::path there = std::filesystem::absolute(folder, error).lexically_normal();
  if (std::filesystem::exists(there, error) && !std::filesystem::is_directory(there, error))
    refuse_folder(folder, "is not a folder; allowed: a folder that is new or empty");
  const bool made = !std::filesystem::exists(there, error);
  while (!std::filesystem::exists(there, error) && there.has_relative_path()) there = there.parent_path();
  if (!std::filesystem::is_directory(there, error))
    refuse_folder(folder, fmt::format("cannot be made: {} is not a folder", there.string()));
  struct statfs system {};
  if (::statfs(there.c_str(), &system) == 0 && (system.f_type == PROC_SUPER_MAGIC || system.f_type == SYSFS_MAGIC))
    refuse_folder(folder, fmt::format("cannot be {}: {} holds no files but the kernel's", made ? "made" : "written to",
                                      there.string()));  // access() would say yes
  if (::access(there.c_str(), W_OK) != 0)
    refuse_folder(folder, fmt::format("cannot be {}: {}", made ? "made" : "written to", std::strerror(errno)));
  if (made || existing == Existing::Overwrite) return;
  const std::vector<std::filesystem::path> files = entries_of(folder);
  if (files.empty()) return;
  refuse_folder(folder, fmt::format("holds files already ({}, ...); allowed: a folder that is new or empty, or "
                                    "--overwrite",
                                    std::ranges::min(files).filename().string()));
}

bool RunFolder::occupied(const std::filesystem::path& folder) {
  return std::filesystem::exists(folder) && !entries_of(folder).empty();
}

void RunFolder::write_config(const Config& config) const { write_file(file(kConfig), to_yaml(config)); }
void RunFolder::write_summary(const RunSummary& summary) const { write_file(file(kSummary), to_json(summary)); }

void write_file(const std::filesystem::path& file, std::string_view text) {
  std::error_code error;
  if (std::filesystem::exists(file, error) && !std::filesystem::is_regular_file(file, error)) {
    std::ofstream stream(file);  // a pipe or a terminal: nothing to rename
    if (!(stream << text << std::flush)) fail(file, "cannot be written");
    return;
  }
  std::filesystem::path beside = file;
  beside += fmt::format(".{}.tmp", ::getpid());
  const int fd = ::open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) fail(file, "cannot be written");
  // On disk before it has its name: after a crash the name means the old file or the whole new one.
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const int why = errno;
      ::close(fd);
      ::unlink(beside.c_str());
      errno = why;
      fail(file, "cannot be written");
    }
    text.remove_prefix(static_cast<std::size_t>(n));
  }
  const bool synced = ::fsync(fd) == 0 || errno == EINVAL;  // EINVAL: not a file that can be synced
  if (::close(fd) != 0 || !synced || std::rename(beside.c_str(), file.c_str()) != 0) {
    const int why = errno;
    ::unlink(beside.c_str());
    errno = why;
    fail(file, "cannot be written");
  }
}

ResidentMemory resident_memory() {
  std::ifstream status("/proc/self/status");
  ResidentMemory memory;
  for (std::string line; std::getline(status, line);) {
    const auto kib = [&] { return std::strtoll(line.c_str() + line.find(':') + 1, nullptr, 10); };
    if (line.starts_with("VmRSS:")) memory.now = kib() * 1024;
    if (line.starts_with("VmHWM:")) memory.peak = kib() * 1024;
  }
  return memory;
}

void reset_peak_resident_memory() { std::ofstream("/proc/self/clear_refs") << "5"; }

}  // namespace regather
