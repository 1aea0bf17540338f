// What a run is refused for before its first step, as far as a process can tell by itself: `check`, `train` and
// `compare` refuse the same, in the same words. It makes no file. What only several ranks can tell
// (that they were started alike) is not here.
#pragma once
#include <filesystem>
#include <string_view>

#include "launcher/config.h"
#include "launcher/data.h"
#include "launcher/forecast.h"
#include "launcher/ranks.h"

namespace regather {

// What a run reads; from here on this thread works with `threads`, on which the workspace depends. Refuses a batch that
// does not suit the ranks, a model or a text that cannot be trained on, and an instruction set that this machine does
// not have.
struct RunInputs {
  RunInputs(const Config& config, int world);
  std::string identity() const;  // JSON: what tells the text of one rank from that of another
  std::vector<Batch> batches(Device& device, int rank, std::int64_t step);  // micro-batches of a step, from 0
  BatchGrid grid;
  Model model;
  Dataset data;
};

// Refuses a text of which no step can be made, or no evaluation: RunInputs does, too.
void require_text(const Config& config, int world);
// The backend and where this process was started.
void require_place(const Config& config, const LaunchPlace& place);
// memory.limit against what a rank needs: an error that all ranks meet alike, if they all are given the forecast of the
// first rank, whose shards are never the smaller ones.
void require_memory(const Config& config, const MemoryForecast& of_first_rank, int world);
// "147.3 MiB at its peak (optimizer 41.4 MiB, activations 30.0 MiB, ...)", the largest first.
std::string describe_memory(const MemoryForecast& forecast);
// "a rank needs ..." as above, and what is offloaded: "; beside it 12.0 MiB in host memory".
std::string describe_needs(const MemoryForecast& forecast);
// A file that is going to be written, given by an option ("--json").
void require_writable(const std::filesystem::path& file, std::string_view option);

}  // namespace regather
