// The residual connection.
#pragma once
#include "tensor/block.h"

namespace regather {

Tensor add(Run& run, Tensor a, Tensor b);  // a, b: [...] -> [...]

}  // namespace regather
