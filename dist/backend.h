// The table of communication backends that a configuration may name. A backend joins the processes that a launcher
// started, or its ranks are threads of this process (run_ranks). It moves no bytes; see dist/transport.h for what does.
#pragma once
#include <memory>
#include <span>
#include <string_view>

#include "dist/communicator.h"

namespace regather {

struct Backend {
  enum class Ranks { Processes, Threads };
  enum class Moves { Host, Gpu };  // whose memory
  std::string_view name;
  Ranks ranks;
  Moves moves;
  // This process as one of those that mpirun or srun started. Null if ranks are threads.
  std::unique_ptr<Communicator> (*join)(const CommunicatorOptions& options);
};
std::span<const Backend> backends();
// Throws UsageError for an unknown name, with the known ones.
const Backend& find_backend(std::string_view name);

}  // namespace regather
