// One rank's part of `regather train`, from a valid configuration to a finished run folder. Collective: every rank of
// the communicator makes one and calls run(). Rank 0 writes and speaks; errors leave it as exceptions.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/forecast.h"
#include "launcher/metrics.h"
#include "launcher/preflight.h"
#include "launcher/profile.h"
#include "launcher/progress.h"
#include "launcher/run_device.h"
#include "launcher/stop_signal.h"
#include "launcher/train.h"
#include "launcher/trainer.h"

namespace regather {

TrainerOptions trainer_options(const Config& config);

// Refuses ranks that were started with something else: a UsageError that names what, both values and the ranks. mine: a
// JSON object.
void require_same_on_all_ranks(Communicator& comm, const std::string& mine, std::string_view what);

class TrainingRun final : public RankProgram {
 public:
  TrainingRun(const Config& config, const TrainOptions& options, const StopSignal& stop, Communicator& comm);
  void run() override;

 private:
  void train_step(std::int64_t step);
  void evaluate(std::int64_t step);
  void write_adapter();
  std::vector<Batch> batches(std::int64_t step);
  void speak_banner(const std::vector<std::string>& places);
  void note_differences(const std::vector<std::string>& lines);
  void note_differences_of_others();
  void report_profile();
  RunSummary summarize();
  bool speaks() const { return comm_.rank() == 0; }
  Device& device() const { return *run_device_.device; }

  Config config_;  // as it runs: with what was planned
  const TrainOptions& options_;
  Communicator& comm_;
  RunDevice run_device_;
  RunInputs inputs_;
  std::unique_ptr<Profiler> profiler_;  // if asked for
  std::unique_ptr<Trainer> trainer_;
  StepForecast forecast_;
  std::int64_t baseline_resident_ = 0;
  std::unique_ptr<RunFolder> folder_;  // of the rank that speaks, as what follows
  std::unique_ptr<MetricsLog> metrics_;
  std::unique_ptr<Progress> progress_;
  std::vector<StepReport> reports_;
  std::vector<EvalMetrics> evaluations_;
  std::vector<std::string> differed_;  // lines, each once: where communication was not as planned, on this rank
};

}  // namespace regather
