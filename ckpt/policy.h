// Checkpoint policies: what a block keeps for its backward, and which block inputs are kept. A policy is data made from
// its options; it does not run anything. The table in policy.cpp lists them; each is a file in ckpt/policies/.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/schedule.h"
#include "tensor/tape.h"

namespace regather {

struct PolicyOptions {
  std::string policy = "full";
  int every_n_layers = 2;
  int segments = 0;              // number of segments; 0: round(sqrt(blocks))
  std::vector<int> layers{};     // indices from 0
  std::optional<Order> order{};  // none: the policy's own choice
};

struct CheckpointPlan {
  std::vector<SavePlan> blocks;   // what each block keeps
  SegmentStarts segments;         // empty: every block input is kept
  std::vector<int> checkpointed;  // blocks that rerun something, in order
};

struct Policy {
  std::string_view name, summary;
  CheckpointPlan (*make)(const PolicyOptions& options, int blocks);
};
std::span<const Policy> policies();
// Throws UsageError for an unknown policy (naming the known ones) or options out of range.
CheckpointPlan make_checkpoint_plan(const PolicyOptions& options, int blocks);

// The policies (ckpt/policies/<name>.cpp).
CheckpointPlan make_none(const PolicyOptions& options, int blocks);
CheckpointPlan make_full(const PolicyOptions& options, int blocks);
CheckpointPlan make_every_n_layers(const PolicyOptions& options, int blocks);
CheckpointPlan make_layers(const PolicyOptions& options, int blocks);
CheckpointPlan make_segments(const PolicyOptions& options, int blocks);
// The given blocks keep nothing but their input, the others everything.
CheckpointPlan checkpoint_blocks(std::vector<int> checkpointed, const PolicyOptions& options, int blocks);

}  // namespace regather
