#include "launcher/compare.h"

#include <array>
#include <atomic>
#include <filesystem>

#include "launcher/compare_measure.h"
#include "launcher/compare_pictures.h"
#include "launcher/compare_report.h"
#include "launcher/summary.h"

namespace regather {
namespace {

constexpr std::string_view kReport = RunFolder::kComparison, kJson = RunFolder::kComparisonJson,
                           kMemory = RunFolder::kMemoryPicture, kTime = RunFolder::kTimePicture;
constexpr std::array kFiles = {kReport, kJson, kMemory, kTime};

// The folder of the run is also that of its comparison, so files of others are neither in the way nor touched.
void require_folder(const Config& config, const CompareOptions& options) {
  RunFolder::require_usable(config.output, RunFolder::Existing::Overwrite);
  for (const std::string_view name : kFiles)
    if (!options.overwrite && std::filesystem::exists(std::filesystem::path(config.output) / name))
      throw UsageError(
          fmt::format("output: value '{}' holds {} of an earlier comparison; allowed: a folder without "
                      "one, or --overwrite",
                      config.output, name));
}

void write_report(const Comparison& comparison, const std::filesystem::path& folder, const CompareOptions& options) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw UsageError(fmt::format("output: value '{}' cannot be made: {}", folder.string(), error.message()));
  const std::string json = to_json(comparison);
  write_file(folder / kMemory, memory_picture(comparison));
  write_file(folder / kTime, time_picture(comparison));
  write_file(folder / kReport, comparison_markdown(comparison, std::string(kMemory), std::string(kTime)));
  write_file(folder / kJson, json);
  if (!options.json_file.empty()) write_file(options.json_file, json);
}

void speak(const Comparison& comparison, const std::filesystem::path& folder) {
  fmt::print("\n{}\n", comparison_table(comparison).text("  "));
  for (const std::string& line : verdict(comparison)) fmt::print("  {}\n", line);
  for (const PolicyResult& p : comparison.policies)
    for (const std::string& line : p.communication_differs)
      fmt::print("  `{}`: communication differs from the plan: {}\n", p.policy, line);
  fmt::print("\n  report    {}\n  pictures  {}, {}\n  numbers   {}\n", (folder / kReport).string(),
             (folder / kMemory).string(), (folder / kTime).string(), (folder / kJson).string());
  std::fflush(stdout);
}

class CompareProgram final : public RankProgram {
 public:
  CompareProgram(const Config& config, const CompareOptions& options, const StopSignal& stop, Communicator& comm,
                 std::atomic<int>& code)
      : config_(config),
        options_(options),
        comm_(comm),
        code_(code),
        measurement_(config, options, comm, say(), [&stop] { return stop.received(); }) {}

  void run() override {
    const bool speaks = comm_.rank() == 0;
    const std::filesystem::path folder = config_.output;
    if (speaks) {
      require_folder(config_, options_);
      fmt::print("regather compare {}: {} rank{}, {} round{} of 1 + {} steps\n", options_.name, comm_.size(),
                 comm_.size() == 1 ? "" : "s", options_.rounds, options_.rounds == 1 ? "" : "s", options_.steps);
      std::fflush(stdout);
    }
    const Comparison comparison = measurement_.run();
    if (speaks) {
      write_report(comparison, folder, options_);
      speak(comparison, folder);
    }
    // The same on all ranks: it is the same comparison.
    if (!holds(comparison)) code_ = static_cast<int>(ExitCode::Failed);
    if (comparison.reference < 0) code_ = static_cast<int>(ExitCode::OutOfMemory);
  }

 private:
  PolicyMeasurement::Say say() const {
    return [speaks = comm_.rank() == 0](std::string_view line) {
      if (!speaks) return;
      fmt::print("  {}\n", line);
      std::fflush(stdout);
    };
  }

  const Config& config_;
  const CompareOptions& options_;
  Communicator& comm_;
  std::atomic<int>& code_;
  PolicyMeasurement measurement_;
};

}  // namespace

int run_compare(const Config& config, const CompareOptions& options, const ReportError& report) {
  // Before any work, on every rank: a policy that is unknown or impossible, and keys that none of them reads.
  for (const std::string& policy : options.policies) with_policy(config, policy);
  refuse_unread_keys(config, options.policies.empty() ? default_policies(config) : options.policies);
  const StopSignal stop;
  std::atomic<int> code{0};
  const int failed = run_on_ranks(
      config, [&](Communicator& comm) { return std::make_unique<CompareProgram>(config, options, stop, comm, code); },
      report);
  return failed != 0 ? failed : code.load();
}

}  // namespace regather
