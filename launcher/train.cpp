#include "launcher/train.h"

#include "launcher/command_line.h"
#include "launcher/training_run.h"

namespace regather {
namespace {

CommunicatorOptions communicator_options(const Config& config) {
  CommunicatorOptions options;
  options.timeout = config.communication.timeout;
  options.interrupt = StopSignal::flag();
  options.warn = [](const std::string& line) { fmt::print(stderr, "regather: {}\n", line); };
  return options;
}

}  // namespace

int run_training(const Config& config, const TrainOptions& options) {
  const StopSignal stop;
  if (config.communication.backend == CommunicationConfig::Backend::Sim) {
    SimOptions sim;
    static_cast<CommunicatorOptions&>(sim) = communicator_options(config);
    run_ranks(static_cast<int>(config.communication.sim_ranks), sim,
              [&](Communicator& comm) { TrainingRun(config, options, stop, comm).run(); });
    return static_cast<int>(ExitCode::Done);
  }
  const bool launched = launch_place([](const char* name) { return std::getenv(name); }).ranks > 1;
  const auto comm = launched ? make_mpi_communicator(communicator_options(config))
                             : make_single_communicator(communicator_options(config));
  try {
    TrainingRun(config, options, stop, *comm).run();
  } catch (const PeerFailed& e) {
    comm->leave(e.what(), e.code());
    throw;
  } catch (const Error& e) {
    comm->leave(e.what(), e.code());
    throw;
  }
  return static_cast<int>(ExitCode::Done);
}

}  // namespace regather
