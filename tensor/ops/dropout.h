// Dropout whose mask is a function of the random key: nothing is saved, and a rerun draws the same mask.
#pragma once
#include "tensor/block.h"

namespace regather {

// x: [B, T, C] -> [B, T, C]. Element e of sequence b is dropped when word e % 4 of run.key.quad(b, e / 4) is below rate
// * 2^32; what is kept is scaled by 1 / (1 - rate). rate 0, or evaluation (a run without a tape): x itself.
Tensor dropout(Run& run, Tensor x, float rate);

// The threshold of a rate in [0, 1): a word below it drops its element.
std::uint32_t dropout_threshold(float rate);

}  // namespace regather
