// What was recorded, as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open: Chrome's trace event format,
// a process a rank and rows for compute, communication and copies. Invariant: two events of a row are one inside the
// other or apart; collectives that fly at the same time get rows of their own.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "tensor/recorder.h"

namespace regather {

// The events of one rank, separated by commas. Times count from zero.
std::string trace_events(int rank, std::span<const Recorder::Recording> recordings, Recorder::Time zero);
// The whole file, from the events of all ranks.
std::string trace_file(std::span<const std::string> of_ranks);

}  // namespace regather
