// A linear layer. It does not know biases of other shapes, nor activation functions.
#pragma once
#include "tensor/block.h"

namespace regather {

// x: [..., C], weight (a parameter id): [O, C], bias: [O] or -1 -> [..., O]
Tensor linear(Run& run, Tensor x, int weight, int bias = -1);

}  // namespace regather
