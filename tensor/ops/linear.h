// A linear layer, with the adapters that its weight's description names. It does not know biases of other shapes, nor
// activation functions.
#pragma once
#include "tensor/block.h"

namespace regather {

// x: [..., C], weight (a parameter id): [O, C], bias: [O] or -1 -> [..., O]
Tensor linear(Run& run, Tensor x, int weight, int bias = -1);

// The operation alone; its parameters are the weight and the bias, if it has one.
enum class LinearBias { None, Added };
std::unique_ptr<const Op> make_linear(LinearBias bias);

}  // namespace regather
