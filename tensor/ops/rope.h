// Rotary position embedding, rotate-half convention (as Llama in Transformers has it).
#pragma once
#include "tensor/block.h"

namespace regather {

// qkv: [B, T, (heads + 2 kv_heads) D], D even -> the same with query and key heads rotated, values unchanged. Pair (i,
// i + D/2) of token t turns by t theta^(-2i/D).
Tensor rope(Run& run, Tensor qkv, std::int64_t heads, std::int64_t kv_heads, double theta);

}  // namespace regather
