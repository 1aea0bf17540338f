#include <numeric>

#include "ckpt/policy.h"

namespace regather {

CheckpointPlan make_full(const PolicyOptions& options, int blocks) {
  std::vector<int> all(static_cast<std::size_t>(blocks));
  std::iota(all.begin(), all.end(), 0);
  return checkpoint_blocks(std::move(all), options, blocks);
}

}  // namespace regather
