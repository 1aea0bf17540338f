// Causal multi-head attention, grouped queries included. It does not rotate positions (rope.h) and has no mask but the
// causal.
#pragma once
#include "tensor/block.h"

namespace regather {

// qkv: [B, T, (heads + 2 kv_heads) D]: query heads, then key heads, then value heads -> [B, T, heads D]. kv_heads
// divides heads. dropout: rate for the probabilities; probability s of row t of head h is element (h T + t) T + s of
// its sequence. None in evaluation (a run without a tape).
Tensor attention(Run& run, Tensor qkv, std::int64_t heads, std::int64_t kv_heads, float dropout = 0.0F);

}  // namespace regather
