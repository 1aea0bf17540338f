// The output layer and the loss in one operation, in chunks of rows: the [N, V] logits never exist whole.
#pragma once
#include "tensor/block.h"

namespace regather {

// x: [B, T, C], targets: [B, T] int32 (-1: ignored, its loss is 0), weight: [V, C] -> token losses [B, T], in nats.
// In training loss and gradient are computed together, in backward(): read the losses after it. The gradient that is
// handed to backward is the weight of each token's loss.
Tensor linear_cross_entropy(Run& run, Tensor x, Tensor targets, int weight);

// Rows of a chunk. Each chunk reads and writes the whole of dW once. On a CPU chunks are as large as 64 MiB of logits
// allow (at C = 768, V = 50257 that traffic is then 2% of the time), and smaller than N. On a GPU they have the rows
// that a product needs to be limited by arithmetic and not by that traffic: in bf16 1920 at C = 768, 1408 at C = 2048,
// 1280 at C = 8192; at most 1 GiB of logits. So memory does not follow N.
std::int64_t cross_entropy_chunk(DeviceKind device, const ValueType& x, std::int64_t vocab);

}  // namespace regather
