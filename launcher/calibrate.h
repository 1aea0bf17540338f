// What operations cost here, measured: a few blocks of the configured model train for a few steps on all the ranks that
// run, with a recorder. Collective. The sizes of tensors are those of the configuration; its depth, policy and memory
// limit do not matter, so a model that does not fit can be calibrated as well.
#pragma once
#include "launcher/config.h"
#include "launcher/cost_model.h"

namespace regather {

class Communicator;
struct RunDevice;

// The same on every rank: the mean over the ranks. Nothing is written to disk.
CostModel calibrate(const Config& config, Communicator& comm);

// Where costs are kept for a rank on that GPU; none: on the CPU.
CostPlace cost_place(const Config& config, std::int64_t ranks, const std::optional<GpuInfo>& gpu);

// What to plan with, the same on every rank: what was measured on this machine with as many threads and ranks, else
// what follows from the machine's limits, which all ranks then measure together.
CostModel costs_for(const Config& config, const RunDevice& run, Communicator& comm);
// The same for ranks that do not run: what was measured with as many, else the limits as one process sees them.
CostModel costs_for(const Config& config, int world);

}  // namespace regather
