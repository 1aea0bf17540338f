// Checkpoint policies: what a block keeps for its backward, and which block inputs are kept. A policy is data made from
// its options; it does not run anything. The table in policy.cpp lists them; each is a file in ckpt/policies/.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/marks.h"
#include "ckpt/schedule.h"
#include "tensor/tape.h"

namespace regather {

// selective: what these layers keep. No layers: those that no other rule lists.
struct KeepRule {
  std::vector<int> layers{};
  std::vector<std::string> keep{};  // as expand_marks() takes them
};

// What is kept waits in host memory, in some of the blocks.
struct OffloadOptions {
  std::vector<std::string>
      names{};          // "all", "marks" (what is kept by mark), or names of kept values; "input": a block's
  int depth = 1;        // see StepPlanOptions
  int keep_last = 0;    // this many last blocks offload nothing: their backward comes first
  double fraction = 1;  // of the other blocks, evenly spread
};

struct PolicyOptions {
  std::string policy = "full";
  int every_n_layers = 2;
  int segments = 0;           // number of segments; 0: round(sqrt(blocks))
  std::vector<int> layers{};  // indices from 0
  std::vector<KeepRule> keep{{.keep = {"attn.out"}}};
  std::vector<Marks> marks{};       // of each block (marks_of); for `keep` and `offload`
  std::vector<Marks> costly{};      // of each block (costly_marks_of); for `offload`
  OffloadOptions offload{};         // no names: nothing is offloaded
  std::vector<SavePlan> planned{};  // budget: of each block
  std::optional<Order> order{};     // none: the policy's own choice
};

struct CheckpointPlan {
  std::vector<SavePlan> blocks;   // what each block keeps, by mark
  SegmentStarts segments;         // empty: every block input is kept
  std::vector<int> checkpointed;  // blocks that drop something costly, in order
  int offload_depth = 0;          // see StepPlanOptions; above 0 if a block offloads something
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
CheckpointPlan make_selective(const PolicyOptions& options, int blocks);
CheckpointPlan make_budget(const PolicyOptions& options, int blocks);
// The given blocks keep nothing but their input, the others everything costly.
CheckpointPlan checkpoint_blocks(std::vector<int> checkpointed, const PolicyOptions& options, int blocks);

}  // namespace regather
