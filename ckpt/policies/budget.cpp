// Each block keeps what was planned for it: the fastest step within a budget (launcher/keep_plan.h makes the plan,
// since it takes the model and what its operations cost).
#include <algorithm>

#include "ckpt/policy.h"

namespace regather {
namespace {

bool drops(const SavePlan& plan) { return plan.unmarked == Placement::Drop || !plan.placed(Placement::Drop).empty(); }

bool moves(const SavePlan& plan) {
  return plan.inputs == Placement::Offload || plan.unmarked == Placement::Offload ||
         !plan.placed(Placement::Offload).empty();
}

}  // namespace

CheckpointPlan make_budget(const PolicyOptions& options, int blocks) {
  check(options.planned.size() == static_cast<std::size_t>(blocks), "budget: a plan of {} blocks for a model of {}",
        options.planned.size(), blocks);
  CheckpointPlan plan{.blocks = options.planned, .segments = {}, .checkpointed = {}};
  for (SavePlan& block : plan.blocks) block.order = options.order.value_or(block.order);
  for (int b = 0; b < blocks; ++b)
    if (drops(plan.blocks[static_cast<std::size_t>(b)])) plan.checkpointed.push_back(b);
  if (std::ranges::any_of(plan.blocks, moves)) plan.offload_depth = 1;  // as the planner counts on
  return plan;
}

}  // namespace regather
