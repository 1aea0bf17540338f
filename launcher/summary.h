// What a run leaves behind: the folder, config.yaml (effective), and summary.json, whose field names scripts read.
// Files that are read as a whole are written beside their place and renamed, so that a reader never sees half of one.
// One rank writes. It does not measure anything (but for this process's memory) and does not combine ranks.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dist/ledger.h"
#include "launcher/config.h"
#include "tensor/memory.h"

namespace regather {

struct SecondsSummary {
  double min = 0, median = 0, max = 0;
};
SecondsSummary summarize_seconds(std::span<const double> seconds);
inline double median(std::span<const double> values) { return summarize_seconds(values).median; }

struct MemorySummary {  // of a rank, the largest over the ranks
  std::int64_t peak = 0;
  BytesByTag at_peak{}, peak_of{};
  std::int64_t peak_rss = 0, baseline_rss = 0;
};

struct EvalMetrics {
  std::int64_t step = 0;  // after which
  double loss = 0, seconds = 0;
};

struct LayerPlan {
  std::int64_t layer = 0;
  bool checkpointed = false;
  std::vector<std::string> keep{}, offload{};  // by mark
};
std::vector<LayerPlan> plan_of_layers(const Config& config);

struct OffloadSummary {                    // of a step and rank, the largest over the ranks; speeds: the slowest
  std::int64_t bytes = 0, host_bytes = 0;  // moved to the host; held there at most
  double to_host = 0, to_device = 0;       // GB/s while copying
  double stalled_milliseconds = 0;         // the computation waited for copies
};

struct RunSummary {
  Config config;
  std::string device{};                                  // what rank 0 computes on: "NVIDIA H200"
  std::int64_t world = 1, steps = 0, skipped_steps = 0;  // skipped: of the steps, by train.nonfinite
  double tokens_per_second = 0;
  SecondsSummary step_seconds;
  std::vector<double> loss, grad_norm;
  std::vector<EvalMetrics> evaluations;
  MemorySummary memory;
  Ledger::Entries collectives_per_step;
  bool expected_matches = true;
  struct {
    double recomputed_flops = 0, forward_flops = 0;  // of a step and rank
    double hidden_seconds = 0;                       // of a step: reruns that a gather in flight hid
    OffloadSummary offload;
    std::vector<LayerPlan> plan;
  } checkpointing;
  struct {
    std::int64_t peak_bytes = 0;
    double step_seconds = 0;
    std::int64_t bytes_on_wire = 0;
  } predicted;
};

// summary.json's text.
std::string to_json(const RunSummary& summary);
// The effective configuration as JSON: sections are objects; sizes and durations are spelled as in YAML.
std::string to_json(const Config& config);

// The folder of a run.
class RunFolder {
 public:
  // Makes the folder. Refuses (UsageError) one that holds files, unless `overwrite`: then the files of an earlier run
  // are removed, with a comparison, and nothing else.
  enum class Existing { Refuse, Overwrite };
  RunFolder(std::filesystem::path folder, Existing existing);
  // The same refusals; makes and removes nothing.
  static void require_usable(const std::filesystem::path& folder, Existing existing);
  static bool occupied(const std::filesystem::path& folder);  // exists and is not empty
  const std::filesystem::path& path() const { return folder_; }
  std::filesystem::path file(std::string_view name) const { return folder_ / name; }
  void write_config(const Config& config) const;
  void write_summary(const RunSummary& summary) const;

  static constexpr std::string_view kAdapter = "adapter";  // a folder, of a LoRA run
  static constexpr std::string_view kConfig = "config.yaml", kSummary = "summary.json", kMetrics = "metrics.jsonl",
                                    kProfile = "profile.json", kTrace = "trace.json";
  static constexpr std::string_view kComparison = "compare.md", kComparisonJson = "compare.json",
                                    kMemoryPicture = "compare_memory.svg", kTimePicture = "compare_time.svg";
  static constexpr std::string_view kEventsPrefix = "events.out.tfevents.", kEventsSuffix = ".regather";

 private:
  std::filesystem::path folder_;
};

// Whole or not at all: a file beside it, then a rename. Throws Error naming the file and the reason.
void write_file(const std::filesystem::path& file, std::string_view text);

// This process's memory in the system's eyes.
struct ResidentMemory {
  std::int64_t now = 0, peak = 0;  // bytes
};
ResidentMemory resident_memory();
void reset_peak_resident_memory();  // the peak starts again at what is resident now

}  // namespace regather
