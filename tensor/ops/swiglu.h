// The gated unit of Llama's feed-forward layer.
#pragma once
#include "tensor/block.h"

namespace regather {

Tensor swiglu(Run& run, Tensor gate, Tensor up);  // gate, up: [..., F] -> [..., F]

}  // namespace regather
