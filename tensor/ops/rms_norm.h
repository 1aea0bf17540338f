// Root-mean-square normalisation over the last dimension, eps 1e-5.
#pragma once
#include "tensor/block.h"

namespace regather {

// x: [..., C], gain: [C] -> [..., C]
Tensor rms_norm(Run& run, Tensor x, int gain);

}  // namespace regather
