// What one step of a configuration needs and takes on one rank, of any number of ranks, before anything is allocated:
// the step itself runs on a device without storage and a communicator that moves nothing. So bytes are those of the
// allocator, to the byte, and traffic is that of the ledger; seconds are the sum of what its operations cost.
// It decides nothing.
#pragma once
#include <vector>

#include "ckpt/step_plan.h"
#include "launcher/config.h"
#include "launcher/cost_model.h"
#include "tensor/memory.h"

namespace regather {

struct MemoryForecast {
  std::int64_t peak = 0;  // of all kinds, in steps and, if there are any, evaluations
  BytesByTag at_peak{}, peak_of{};
};

struct StepForecast : MemoryForecast {
  Ledger::Entries collectives;  // of a step after the first ones, which also look whether every parameter learns
  std::int64_t wire_bytes = 0;
  double forward_flops = 0, recomputed_flops = 0;

  // Of a rank's step; all zero without costs.
  struct Seconds {
    double forward = 0, recompute = 0, backward = 0, update = 0, copy = 0, communication = 0, overhead = 0;
    double stalled = 0;  // for copies to the host and back
    double total() const { return forward + recompute + backward + update + copy + communication + overhead + stalled; }
  };
  Seconds seconds;

  // Each action of the step's plan, in order.
  struct Moment {
    Action action;
    std::int64_t activations = 0, all = 0;  // the most that is live during it: of the kind Activations; of every kind
    std::int64_t kept = 0;   // by how much the live activations grew, but for what others gave back meanwhile
    std::int64_t moved = 0;  // of what it kept: sets out for the host
    double seconds = 0;      // of its operations
    double rerun_seconds = 0;
    std::vector<std::string> reruns{};  // what runs again: marks, or names of operations
  };
  std::vector<Moment> moments;
  std::int64_t outside = 0;  // the most of all kinds before the first and after the last
};

struct ForecastOptions {
  const CostModel* costs = nullptr;  // none: no seconds
  // Bytes a second of a link on which transfers run beside the operations; 0: collectives take this machine's own time,
  // as measured.
  double bandwidth = 0;
  std::int64_t memory_limit = 0;  // the step is refused as it would be (OutOfMemory); 0: none
};

StepForecast forecast_step(const Config& config, const Model& model, int rank, int world,
                           const ForecastOptions& options = {});

}  // namespace regather
