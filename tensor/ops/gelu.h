// The Gaussian error linear unit in its tanh form, as GPT-2 has it.
#pragma once
#include "tensor/block.h"

namespace regather {

Tensor gelu(Run& run, Tensor x);  // x: [...] -> [...]

}  // namespace regather
