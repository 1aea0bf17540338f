// Runs a program on every rank of the configured backend, and ends all ranks together when one fails: it says why,
// tells the others, and only then gives back memory that collectives may still use. It does not know what the program
// does.
#pragma once
#include <functional>
#include <memory>

#include "dist/communicator.h"
#include "launcher/config.h"
#include "launcher/launch_place.h"
#include "launcher/stop_signal.h"

namespace regather {

class RankProgram {  // what one rank does; owns everything that its collectives read and write
 public:
  virtual ~RankProgram() = default;
  virtual void run() = 0;
};
using MakeRankProgram = std::function<std::unique_ptr<RankProgram>(Communicator&)>;

// An error that every rank meets alike: the first one says it for all, as it does a UsageError.
class FoundByAllRanks : public Error {
 public:
  using Error::Error;
};

enum class ErrorOrigin { Here, Peer, AllRanks };  // Peer: the error says that another rank left
using ReportError = std::function<void(const Error&, ErrorOrigin, const LaunchPlace&)>;

// The exit code: of ranks that are threads, that of the failure which came first. `report` is called on a rank that
// fails, before it tells the others: a launcher may end this rank as soon as another one has ended.
int run_on_ranks(const Config& config, const MakeRankProgram& make, const ReportError& report);

}  // namespace regather
