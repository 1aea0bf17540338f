// Two levels (Chen et al., "Training deep nets with sublinear memory cost", 2016): with S segments of K blocks, the
// inputs of S segments and of one segment's K blocks are alive, and one block's activations. Each block is gathered for
// its own replay and backward; a segment is never gathered as a whole.
#include <algorithm>
#include <cmath>

#include "ckpt/policy.h"

namespace regather {

CheckpointPlan make_segments(const PolicyOptions& options, int blocks) {
  const int wanted = options.segments == 0 ? static_cast<int>(std::lround(std::sqrt(blocks))) : options.segments;
  if (wanted < 1 || wanted > blocks)
    throw UsageError(fmt::format("activation_checkpointing.segments: {} is out of range; allowed: 0 (automatic) to {}",
                                 options.segments, blocks));
  CheckpointPlan plan = make_full(options, blocks);
  for (int s = 0; s < wanted; ++s)  // the first (blocks mod wanted) segments have one block more
    plan.segments.push_back(s * (blocks / wanted) + std::min(s, blocks % wanted));
  return plan;
}

}  // namespace regather
