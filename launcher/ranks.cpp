#include "launcher/ranks.h"

#include <mutex>

#include "dist/backend.h"

namespace regather {
namespace {

CommunicatorOptions communicator_options(const Config& config) {
  CommunicatorOptions options;
  options.timeout = config.communication.timeout;
  options.interrupt = StopSignal::flag();
  options.warn = [](const std::string& line) { fmt::print(stderr, "regather: {}\n", line); };
  return options;
}

// Runs the program; on an error reports it and tells the other ranks. Returns the error's code.
int run_and_leave(const Config& config, const MakeRankProgram& make, Communicator& comm,
                  std::unique_ptr<RankProgram>& program, const ReportError& report) {
  const auto leave = [&](Error error, ErrorOrigin origin) {
    add_place(config, error);
    report(error, origin, {comm.rank(), comm.size()});
    comm.leave(error.what(), error.code());
    return static_cast<int>(error.code());
  };
  try {
    program = make(comm);
    program->run();
    return static_cast<int>(ExitCode::Done);
  } catch (const PeerFailed& e) {
    return leave(e, ErrorOrigin::Peer);
  } catch (const FoundByAllRanks& e) {
    // Not before all have found it: the one that says it for all must not first hear that another one left.
    try {
      comm.exchange("");
    } catch (const PeerFailed&) {
      // One is through already, and leaves; or one fails by itself, and says so.
    } catch (const Error& vanished) {
      return leave(vanished, ErrorOrigin::Here);
    }
    return leave(e, ErrorOrigin::AllRanks);
  } catch (const Error& e) {
    return leave(e, ErrorOrigin::Here);
  } catch (const std::bad_alloc&) {
    return leave(OutOfMemory("the system has no more memory"), ErrorOrigin::Here);
  } catch (const std::exception& e) {
    return leave(Error(e.what()), ErrorOrigin::Here);
  }
}

// Of several failures, the code of the first; but one that only noticed another rank's end gives way to that rank's
// own.
class FirstFailure {
 public:
  void add(ExitCode code, ErrorOrigin origin) {
    const bool follows = origin == ErrorOrigin::Peer || code == ExitCode::PeerVanished;
    const std::lock_guard lock(mutex_);
    if (code_ != ExitCode::Done && (follows || !follows_)) return;
    code_ = code;
    follows_ = follows;
  }
  int code() const { return static_cast<int>(code_); }  // when the ranks have ended

 private:
  std::mutex mutex_;
  ExitCode code_ = ExitCode::Done;
  bool follows_ = false;
};

}  // namespace

int run_on_ranks(const Config& config, const MakeRankProgram& make, const ReportError& report) {
  const Backend& backend = find_backend(config.communication.backend);
  if (backend.ranks == Backend::Ranks::Threads) {
    SimOptions sim;
    static_cast<CommunicatorOptions&>(sim) = communicator_options(config);
    FirstFailure failure;
    const ReportError note = [&](const Error& error, ErrorOrigin origin, const LaunchPlace& place) {
      failure.add(error.code(), origin);  // now: leaving takes a while, and differently long on each rank
      report(error, origin, place);
    };
    run_ranks(static_cast<int>(config.communication.sim_ranks), sim, [&](Communicator& comm) {
      std::unique_ptr<RankProgram> program;
      run_and_leave(config, make, comm, program, note);
    });
    return failure.code();
  }
  const bool launched = launch_place().ranks > 1;
  // Outlives the communicator, which moves its device's memory: a failed one may have collectives under way.
  std::unique_ptr<RankProgram> program;
  const auto comm =
      launched ? backend.join(communicator_options(config)) : make_single_communicator(communicator_options(config));
  return run_and_leave(config, make, *comm, program, report);
}

}  // namespace regather
