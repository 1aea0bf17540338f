#include "launcher/train.h"

#include "launcher/training_run.h"

namespace regather {

int run_training(const Config& config, const TrainOptions& options, const ReportError& report) {
  const StopSignal stop;
  return run_on_ranks(
      config, [&](Communicator& comm) { return std::make_unique<TrainingRun>(config, options, stop, comm); }, report);
}

}  // namespace regather
