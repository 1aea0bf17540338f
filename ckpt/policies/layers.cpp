#include <algorithm>

#include "ckpt/policy.h"

namespace regather {

CheckpointPlan make_layers(const PolicyOptions& options, int blocks) {
  std::vector<int> chosen = options.layers;
  std::ranges::sort(chosen);
  if (const auto twice = std::ranges::adjacent_find(chosen); twice != chosen.end())
    throw UsageError(fmt::format("activation_checkpointing.layers: {} is listed twice", *twice));
  for (int b : chosen)
    if (b < 0 || b >= blocks)
      throw UsageError(
          fmt::format("activation_checkpointing.layers: {} is out of range; allowed: 0 to {}", b, blocks - 1));
  return checkpoint_blocks(std::move(chosen), options, blocks);
}

}  // namespace regather
