// Table lookup for tokens, with learned positions if asked for.
#pragma once
#include "tensor/block.h"

namespace regather {

// tokens: [B, T] int32, table: [V, C], positions: [at least T, C] or -1 -> x: [B, T, C] = table[token] (+
// positions[t]). A token outside [0, V) is an error.
Tensor embedding(Run& run, Tensor tokens, int table, int positions = -1);

}  // namespace regather
