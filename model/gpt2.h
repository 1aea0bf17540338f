// GPT-2 (Radford et al., 2019), exactly: pre-norm blocks, learned positions, tanh GELU, biases everywhere, a final
// norm, and an output matrix that is the embedding table unless tie_embeddings is false. Names are Hugging Face's
// without a prefix
// ("h.3.attn.c_attn.weight"); the four Conv1D weights of a block are stored [out, in] here and [in, out] there, so they
// are transposed on the way in and out. Units: "wte", "wpe", "block 0", ..., "head". It knows no rank, no shard and no
// checkpoint policy.
#pragma once
#include "model/config.h"
#include "tensor/block.h"

namespace regather {

Model make_gpt2(const ModelConfig& config);

}  // namespace regather
