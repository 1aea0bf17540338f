// Llama (Touvron et al., 2023), exactly: pre-norm blocks with RMSNorm, rotary positions, grouped-query attention,
// SwiGLU, no biases, a final norm; the output matrix is untied unless tie_embeddings is true. Names are Hugging Face's
// ("model.layers.3.mlp.up_proj.weight"), all weights [out, in] as there, with one exception: self_attn.qkv_proj.weight
// [(H + 2 KV) D, C] is the rows of q_proj, then k_proj, then v_proj. Rotary pairs are as there, too: element i of a
// head turns with element i + D/2. Units: "wte", "block 0", ..., "head". It knows no rank, no shard and no checkpoint
// policy.
#pragma once
#include "model/config.h"
#include "tensor/block.h"

namespace regather {

Model make_llama(const ModelConfig& config);

}  // namespace regather
