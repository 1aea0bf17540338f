// What a rank computes on: made here alone, from the configuration and from who else runs where. A rank on GPUs takes
// one of those that it sees, whether every rank of a machine sees all of them or the launcher gives each its own.
// It runs nothing.
#pragma once
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dist/communicator.h"
#include "launcher/config.h"

namespace regather {

struct RunDevice {
  std::unique_ptr<Device> device;
  std::optional<GpuInfo> gpu{};  // none: the CPU
  std::string name;              // "AMD EPYC 7B13", "NVIDIA H200"
  std::string memory_of;         // whose memory it takes, as messages have it: "node3", "node3, GPU 2"
  std::int64_t available = 0;    // bytes of that, 0: not known
  int sharing = 1;               // ranks of this run that take it
};
// Collective. limit: bytes that a rank may allocate, 0: no limit. Throws the same UsageError on every rank if any of
// them cannot have the device that it needs.
RunDevice make_run_device(const Config& config, Communicator& comm, std::int64_t limit);
// The same, and it is the run's: the communicator moves its memory, and makes progress while it computes.
RunDevice take_run_device(const Config& config, Communicator& comm, std::int64_t limit);

// The GPUs that a rank sees, by their ids, in the order of their numbers.
struct SeenGpus {
  std::string host;
  std::vector<std::string> ids;
};
// By rank, the number of the GPU that it takes: of those it sees, each at least one, the first that the fewest ranks
// before it have. Whether ranks may share one, the communicator says.
std::vector<int> choose_gpus(std::span<const SeenGpus> of_ranks);

DeviceKind kind_of_device(const Config& config);

// How fast it could be: measured on a CPU, for about so long each; what a GPU says of itself.
MachineLimits limits_of(const RunDevice& run, DType compute, std::chrono::milliseconds each);

// The GPU that a plan is for: the first of this machine, else one that is assumed, an A100 of 80 GB. None on a CPU.
std::optional<GpuInfo> gpu_to_plan_for(const Config& config);

// "cuda: NVIDIA H200, 143771 MiB", or why it is not here: for a machine where nothing is run.
std::string describe_device(const Config& config);

}  // namespace regather
