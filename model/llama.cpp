#include "model/llama.h"

#include <utility>

#include "model/build.h"
#include "tensor/ops/add.h"
#include "tensor/ops/attention.h"
#include "tensor/ops/dropout.h"
#include "tensor/ops/embedding.h"
#include "tensor/ops/linear.h"
#include "tensor/ops/linear_cross_entropy.h"
#include "tensor/ops/rms_norm.h"
#include "tensor/ops/rope.h"
#include "tensor/ops/swiglu.h"

namespace regather {
namespace {

// (tokens [B, T]) -> x [B, T, C]
class LlamaEmbedding final : public Block {
 public:
  explicit LlamaEmbedding(float dropout) : dropout_(dropout) {}
  Activations forward(Run& run, const Activations& in) const override {
    Tensor x = embedding(run, in[0], kTokens);
    x = dropout(run, std::move(x), dropout_);
    return {std::move(x)};
  }
  bool differentiable(std::size_t) const override { return false; }

 private:
  enum { kTokens };
  float dropout_;
};

struct LlamaSizes {
  std::int64_t heads, kv_heads;
  float rope_theta, dropout;
};

// x [B, T, C] -> [B, T, C]:  mid = x + attention(norm(x)),  y = mid + swiglu(norm(mid))
class LlamaBlock final : public Block {
 public:
  explicit LlamaBlock(const LlamaSizes& sizes) : s_(sizes) {}

  Activations forward(Run& run, const Activations& in) const override {
    const Tensor& x = in[0];
    Tensor h = rms_norm(run, x, kNorm1);
    h = run.mark("attn.norm", std::move(h));
    h = linear(run, std::move(h), kQkv);
    h = run.mark("attn.qkv", std::move(h));
    h = rope(run, std::move(h), s_.heads, s_.kv_heads, s_.rope_theta);
    h = run.mark("attn.rope", std::move(h));
    h = attention(run, std::move(h), s_.heads, s_.kv_heads, s_.dropout);
    h = run.mark("attn.core", std::move(h));
    h = linear(run, std::move(h), kProjection);
    h = dropout(run, std::move(h), s_.dropout);
    h = run.mark("attn.out", std::move(h));
    Tensor mid = add(run, x, std::move(h));
    mid = run.mark("mid", std::move(mid));
    h = rms_norm(run, mid, kNorm2);
    h = run.mark("mlp.norm", std::move(h));
    Tensor gate = linear(run, h, kGate);
    gate = run.mark("mlp.gate", std::move(gate));
    h = linear(run, std::move(h), kUp);
    h = run.mark("mlp.up", std::move(h));
    h = swiglu(run, std::move(gate), std::move(h));
    h = run.mark("mlp.act", std::move(h));
    h = linear(run, std::move(h), kDown);
    h = dropout(run, std::move(h), s_.dropout);
    h = run.mark("mlp.down", std::move(h));
    h = add(run, std::move(mid), std::move(h));
    return {std::move(h)};
  }

  enum { kNorm1, kQkv, kProjection, kNorm2, kGate, kUp, kDown };

 private:
  LlamaSizes s_;
};

// (x [B, T, C], targets [B, T]) -> token losses [B, T]
class LlamaHead final : public Block {
 public:
  Activations forward(Run& run, const Activations& in) const override {
    Tensor h = rms_norm(run, in[0], kNorm);
    h = run.mark("head.norm", std::move(h));
    h = linear_cross_entropy(run, std::move(h), in[1], kOutput);
    return {std::move(h)};
  }

 private:
  enum { kNorm, kOutput };  // kOutput: the embedding table when tied
};

UnitSpec block_unit(const ModelConfig& m, std::int64_t layer) {
  const std::int64_t c = m.hidden, f = m.ffn_hidden, head_size = c / m.heads;
  const Init init = normal(m.init_std), residual = residual_init(m);
  const std::string p = fmt::format("model.layers.{}.", layer);
  return {fmt::format("block {}", layer),
          {norm_gain(p + "input_layernorm.weight", c),
           weight(p + "self_attn.qkv_proj.weight", (m.heads + 2 * m.kv_heads) * head_size, c, init),
           weight(p + "self_attn.o_proj.weight", c, c, residual), norm_gain(p + "post_attention_layernorm.weight", c),
           weight(p + "mlp.gate_proj.weight", f, c, init), weight(p + "mlp.up_proj.weight", f, c, init),
           weight(p + "mlp.down_proj.weight", c, f, residual)}};
}

// What model.lora.targets may name. The fused weight is three layers in the original, and so for adapters.
std::vector<LinearLayer> linear_layers(const ModelConfig& m, std::int64_t layer) {
  const std::int64_t c = m.hidden, kv = m.kv_heads * (c / m.heads);
  const std::string p = fmt::format("model.layers.{}.", layer);
  return {{"attn.q", p + "self_attn.q_proj", LlamaBlock::kQkv, 0, c, "attn.qkv"},
          {"attn.k", p + "self_attn.k_proj", LlamaBlock::kQkv, c, kv, "attn.qkv"},
          {"attn.v", p + "self_attn.v_proj", LlamaBlock::kQkv, c + kv, kv, "attn.qkv"},
          {"attn.proj", p + "self_attn.o_proj", LlamaBlock::kProjection},
          {"mlp.gate", p + "mlp.gate_proj", LlamaBlock::kGate},
          {"mlp.up", p + "mlp.up_proj", LlamaBlock::kUp},
          {"mlp.down", p + "mlp.down_proj", LlamaBlock::kDown}};
}

void check_llama(const ModelConfig& m) {
  check_sizes(m);
  if (m.kv_heads < 1 || m.heads % m.kv_heads != 0)
    throw UsageError(fmt::format("model.kv_heads: must divide model.heads ({}), but is {}", m.heads, m.kv_heads));
  if ((m.hidden / m.heads) % 2 != 0)
    throw UsageError(fmt::format("model.heads: rotary positions need an even head size, but hidden {} / heads {} is {}",
                                 m.hidden, m.heads, m.hidden / m.heads));
  if (!(m.rope_theta > 0)) throw UsageError(fmt::format("model.rope_theta: must be above 0, but is {}", m.rope_theta));
}

}  // namespace

Model make_llama(const ModelConfig& config) {
  ModelConfig m = config;
  if (m.kv_heads == 0) m.kv_heads = m.heads;
  if (m.ffn_hidden == 0) m.ffn_hidden = (8 * m.hidden / 3 + 63) / 64 * 64;
  check_llama(m);

  ModelBuilder build(m);
  const Init init = normal(m.init_std);
  const int wte = build.unit({"wte", {weight("model.embed_tokens.weight", m.vocab, m.hidden, init)}});
  build.embedding(std::make_unique<LlamaEmbedding>(m.dropout), {wte});
  const LlamaSizes sizes{m.heads, m.kv_heads, m.rope_theta, m.dropout};
  for (std::int64_t i = 0; i < m.layers; ++i)
    build.block(std::make_unique<LlamaBlock>(sizes), {build.unit(block_unit(m, i), linear_layers(m, i))});
  UnitSpec head{"head", {norm_gain("model.norm.weight", m.hidden)}};
  if (!m.tie_embeddings) head.params.push_back(weight("lm_head.weight", m.vocab, m.hidden, init));
  std::vector<int> head_units{build.unit(std::move(head))};
  if (m.tie_embeddings) head_units.push_back(wte);
  build.head(std::make_unique<LlamaHead>(), std::move(head_units));
  return std::move(build).finish();
}

}  // namespace regather
