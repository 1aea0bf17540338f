#include "ckpt/policy.h"

#include <algorithm>
#include <cmath>

namespace regather {
namespace {

constexpr Policy kPolicies[] = {
    {"none", "every block keeps what its backward reads, but for what is cheap to run again", make_none},
    {"full", "every block keeps its input only and is run again in its backward", make_full},
    {"every_n_layers", "blocks 0, n, 2n, ... keep their input only, the others as none", make_every_n_layers},
    {"segments", "only the first input of each segment of blocks is kept; two extra forwards", make_segments},
    {"layers", "the listed blocks keep their input only, the others as none", make_layers},
    {"selective", "every block keeps its input and the marked values that `keep` names", make_selective},
    {"budget", "every block keeps what was planned for it: the fastest step within a budget of memory", make_budget},
};

// Moves what the names stand for, where the block keeps it. Returns the names that stand for something kept here.
std::vector<std::string> offload_names(SavePlan& block, const std::vector<std::string>& names, const Marks& marks,
                                       const Marks& costly) {
  std::vector<std::string> moved;
  const auto move = [&](Placement& p, const std::string& name) {
    if (p != Placement::Keep) return;
    p = Placement::Offload;
    moved.push_back(name);
  };
  for (const std::string& name : names) {
    if (name == kInput || name == "all") move(block.inputs, name);
    if (name == "all") move(block.unmarked, name);
    if (name == "all" || name == "marks")
      for (auto& [mark, placement] : block.marks) move(placement, name);
    if (name == kInput || name == "all" || name == "marks") continue;
    for (const std::string& mark : expand_marks({name}, marks)) {
      const auto at = block.marks.find(mark);
      if (at != block.marks.end())
        move(at->second, name);
      else if (block.unmarked == Placement::Keep && std::ranges::find(costly, mark) != costly.end())
        move(block.marks.emplace(mark, Placement::Keep).first->second, name);
    }
  }
  return moved;
}

void offload(CheckpointPlan& plan, const PolicyOptions& options) {
  const OffloadOptions& o = options.offload;
  const int blocks = static_cast<int>(plan.blocks.size()), candidates = std::max(0, blocks - o.keep_last);
  check(o.depth >= 1 && o.keep_last >= 0 && o.fraction >= 0 && o.fraction <= 1,
        "offload: depth {}, keep_last {}, fraction {}", o.depth, o.keep_last, o.fraction);
  std::vector<std::string> moved;
  for (int b = 0; b < blocks; ++b) {
    SavePlan all = plan.blocks[static_cast<std::size_t>(b)];
    const auto of_block = [b](const std::vector<Marks>& of) {
      return of.empty() ? Marks() : of[static_cast<std::size_t>(b)];
    };
    const auto found = offload_names(all, o.names, of_block(options.marks), of_block(options.costly));
    moved.insert(moved.end(), found.begin(), found.end());
    const auto share = [&](int n) { return std::floor(o.fraction * n + 1e-9); };
    if (b < candidates && share(b + 1) > share(b)) plan.blocks[static_cast<std::size_t>(b)] = std::move(all);
  }
  for (const std::string& name : o.names)
    if (std::ranges::find(moved, name) == moved.end())
      throw UsageError(
          fmt::format("policy {} keeps no value that '{}' stands for, so none can be offloaded; allowed: all, input, "
                      "or names of what it keeps",
                      options.policy, name));
  plan.offload_depth = o.depth;
}

}  // namespace

std::span<const Policy> policies() { return kPolicies; }

CheckpointPlan make_checkpoint_plan(const PolicyOptions& options, int blocks) {
  const auto found = std::ranges::find(kPolicies, options.policy, &Policy::name);
  if (found == std::end(kPolicies)) {
    std::string known;
    for (const Policy& p : kPolicies) known += (known.empty() ? "" : ", ") + std::string(p.name);
    throw UsageError(fmt::format("checkpoint policy '{}' is not known; allowed: {}", options.policy, known));
  }
  CheckpointPlan plan = found->make(options, blocks);
  if (!options.offload.names.empty())
    with_context([] { return "activation_checkpointing.offload"; }, [&] { offload(plan, options); });
  return plan;
}

CheckpointPlan checkpoint_blocks(std::vector<int> checkpointed, const PolicyOptions& options, int blocks) {
  CheckpointPlan plan;
  plan.blocks.assign(static_cast<std::size_t>(blocks), keep_costly());
  for (int b : checkpointed) plan.blocks.at(static_cast<std::size_t>(b)) = drop_all();
  for (SavePlan& block : plan.blocks) block.order = options.order.value_or(Order::Lazy);
  plan.checkpointed = std::move(checkpointed);
  return plan;
}

}  // namespace regather
