// Layer normalisation over the last dimension, eps 1e-5.
#pragma once
#include "tensor/block.h"

namespace regather {

// x: [..., C], gain: [C], bias: [C] -> [..., C]
Tensor layer_norm(Run& run, Tensor x, int gain, int bias);

}  // namespace regather
