// What a model is built from; the `model` section of a configuration.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace regather {

// Low-rank adapters; see model/lora.h.
struct LoraOptions {
  std::int64_t rank = 0;                                         // 0: none
  double alpha = 16;                                             // what they compute is scaled by alpha / rank
  std::vector<std::string> targets = {"attn.qkv", "attn.proj"};  // linear layers of the model, or patterns with *
};

struct ModelConfig {
  std::string type = "gpt2";
  std::int64_t layers = 6, hidden = 384, heads = 6;
  std::int64_t kv_heads = 0;    // llama; 0: as many as heads
  std::int64_t ffn_hidden = 0;  // 0: 4 C (gpt2), 8/3 C rounded up to a multiple of 64 (llama)
  float rope_theta = 10000.0F;  // llama
  std::int64_t vocab = 256, max_sequence = 256;
  float dropout = 0.0F;
  bool tie_embeddings = true;
  float init_std = 0.02F;             // of every weight matrix; residual projections get init_std / sqrt(2 layers)
  std::vector<std::string> frozen{};  // parameter names or patterns with *: not trained
  LoraOptions lora{};
};

}  // namespace regather
