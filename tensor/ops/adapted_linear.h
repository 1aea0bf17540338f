// A linear layer with low-rank adapters (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021): what
// linear() runs where the weight's description has some. It does not know which parameters are frozen.
#pragma once
#include "tensor/ops/linear.h"

namespace regather {

// Parameters: those of the linear layer, then down and up of each adapter.
std::unique_ptr<const Op> make_adapted_linear(LinearBias bias, std::vector<Adapter> adapters);

}  // namespace regather
