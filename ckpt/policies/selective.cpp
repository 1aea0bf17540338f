// Each block keeps the values that its rule names; everything else is run again when its backward asks for it.
#include <algorithm>

#include "ckpt/policy.h"

namespace regather {
namespace {

constexpr std::string_view kKey = "activation_checkpointing.keep";

// The rule of each block. A rule without layers is for those that no other one lists.
std::vector<const KeepRule*> rules_by_block(const std::vector<KeepRule>& rules, int blocks) {
  std::vector<const KeepRule*> rule_of(static_cast<std::size_t>(blocks), nullptr);
  const KeepRule* others = nullptr;
  for (const KeepRule& rule : rules) {
    if (rule.layers.empty() && std::exchange(others, &rule))
      throw UsageError("two entries list no layers; allowed: one, for the layers that no other entry lists");
    for (int b : rule.layers) {
      if (b < 0 || b >= blocks)
        throw UsageError(fmt::format("layer {} is out of range; allowed: 0 to {}", b, blocks - 1));
      if (std::exchange(rule_of[static_cast<std::size_t>(b)], &rule))
        throw UsageError(fmt::format("layer {} is listed twice", b));
    }
  }
  for (auto& rule : rule_of)
    if (!rule) rule = others;
  return rule_of;
}

}  // namespace

CheckpointPlan make_selective(const PolicyOptions& options, int blocks) {
  check(options.marks.size() == static_cast<std::size_t>(blocks), "selective: the marks of {} blocks for a model of {}",
        options.marks.size(), blocks);
  CheckpointPlan plan = make_full(options, blocks);
  with_context([] { return kKey; },
               [&] {
                 const auto rules = rules_by_block(options.keep, blocks);
                 for (std::size_t b = 0; b < rules.size(); ++b)
                   if (rules[b])
                     for (const std::string& mark : expand_marks(rules[b]->keep, options.marks[b]))
                       plan.blocks[b].marks[mark] = Placement::Keep;
               });
  return plan;
}

}  // namespace regather
