// The 1st, (1+n)th, (1+2n)th, ... block is checkpointed, as in Transformers: indices 0, n, 2n, ...
#include "ckpt/policy.h"

namespace regather {

CheckpointPlan make_every_n_layers(const PolicyOptions& options, int blocks) {
  if (options.every_n_layers < 1)
    throw UsageError(fmt::format("activation_checkpointing.every_n_layers: {} is out of range; allowed: 1 or more",
                                 options.every_n_layers));
  std::vector<int> chosen;
  for (int b = 0; b < blocks; b += options.every_n_layers) chosen.push_back(b);
  return checkpoint_blocks(std::move(chosen), options, blocks);
}

}  // namespace regather
