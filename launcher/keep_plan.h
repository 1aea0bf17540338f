// Makes the plan of `activation_checkpointing.policy: budget`: which values each block keeps, which of them wait in
// host memory (with `offload: auto`), and how many blocks stay resident, so that a step is fastest within
// activation_checkpointing.budget, or within memory.limit. What values cost and need comes from the model's own code
// (ckpt/keep_sets.h) and from a step without storage (launcher/forecast.h); the choice is the planner's
// (ckpt/planner.h), and the step that was chosen is run without storage once more: the bytes that are stated are the
// allocator's. The same on every rank that has the same costs.
#pragma once
#include <optional>
#include <vector>

#include "ckpt/keep_sets.h"
#include "ckpt/planner.h"
#include "launcher/forecast.h"

namespace regather {

enum class Counted { ActivationBytes, AllBytes };

struct KeepPlan {
  std::vector<SavePlan> blocks{};
  int slots = 0;
  Counted counted = Counted::ActivationBytes;
  std::int64_t limit = 0;  // bytes that were allowed
  struct Point {
    std::int64_t bytes;                   // at the peak, of what is counted
    double seconds;                       // of a step
    int inputs_only, partly, everything;  // blocks that keep so much
    std::int64_t host = 0;                // bytes that wait in host memory
  };
  std::vector<Point> frontier{};  // from least memory to least time
  std::size_t chosen = 0;         // of the frontier
};

// The fastest plan within the limit that the configuration gives. Throws, with the least that is enough: UsageError if
// that is the budget, an error of exit code OutOfMemory if it is memory.limit.
KeepPlan make_keep_plan(const Config& config, const Model& model, int world, const CostModel& costs);
// What could be planned, whatever the configuration's policy is: the frontier of activation bytes and time.
KeepPlan explore_keep_plans(const Config& config, const Model& model, int world, const CostModel& costs);

// The configuration with what was planned in it, whatever its policy was.
Config with_plan(const Config& config, const KeepPlan& plan);
// The configuration as it runs: with policy budget, what was planned is in it; another one is returned as it is.
Config settled(const Config& config, const Model& model, int world, const CostModel& costs);

}  // namespace regather
