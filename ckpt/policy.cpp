#include "ckpt/policy.h"

#include <algorithm>

namespace regather {
namespace {

constexpr Policy kPolicies[] = {
    {"none", "every block keeps what its backward reads", make_none},
    {"full", "every block keeps its input only and is run again in its backward", make_full},
    {"every_n_layers", "blocks 0, n, 2n, ... keep their input only, the others everything", make_every_n_layers},
    {"segments", "only the first input of each segment of blocks is kept; two extra forwards", make_segments},
    {"layers", "the listed blocks keep their input only, the others everything", make_layers},
};

}  // namespace

std::span<const Policy> policies() { return kPolicies; }

CheckpointPlan make_checkpoint_plan(const PolicyOptions& options, int blocks) {
  const auto found = std::ranges::find(kPolicies, options.policy, &Policy::name);
  if (found == std::end(kPolicies)) {
    std::string known;
    for (const Policy& p : kPolicies) known += (known.empty() ? "" : ", ") + std::string(p.name);
    throw UsageError(fmt::format("checkpoint policy '{}' is not known; allowed: {}", options.policy, known));
  }
  return found->make(options, blocks);
}

CheckpointPlan checkpoint_blocks(std::vector<int> checkpointed, const PolicyOptions& options, int blocks) {
  CheckpointPlan plan;
  plan.blocks.assign(static_cast<std::size_t>(blocks), keep_all());
  for (int b : checkpointed) plan.blocks.at(static_cast<std::size_t>(b)) = drop_all();
  for (SavePlan& block : plan.blocks) block.order = options.order.value_or(Order::Lazy);
  plan.checkpointed = std::move(checkpointed);
  return plan;
}

}  // namespace regather
