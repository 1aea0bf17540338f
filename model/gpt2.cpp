#include "model/gpt2.h"

#include <utility>

#include "model/build.h"
#include "tensor/ops/add.h"
#include "tensor/ops/attention.h"
#include "tensor/ops/dropout.h"
#include "tensor/ops/embedding.h"
#include "tensor/ops/gelu.h"
#include "tensor/ops/layer_norm.h"
#include "tensor/ops/linear.h"
#include "tensor/ops/linear_cross_entropy.h"

namespace regather {
namespace {

// (tokens [B, T]) -> x [B, T, C]
class Gpt2Embedding final : public Block {
 public:
  explicit Gpt2Embedding(float dropout) : dropout_(dropout) {}
  Activations forward(Run& run, const Activations& in) const override {
    Tensor x = embedding(run, in[0], kTokens, kPositions);
    x = dropout(run, std::move(x), dropout_);
    return {std::move(x)};
  }
  bool differentiable(std::size_t) const override { return false; }

 private:
  enum { kTokens, kPositions };
  float dropout_;
};

// x [B, T, C] -> [B, T, C]:  mid = x + attention(norm(x)),  y = mid + mlp(norm(mid))
class Gpt2Block final : public Block {
 public:
  Gpt2Block(std::int64_t heads, float dropout) : heads_(heads), dropout_(dropout) {}

  Activations forward(Run& run, const Activations& in) const override {
    const Tensor& x = in[0];
    Tensor h = layer_norm(run, x, kNorm1, kNorm1 + 1);
    h = run.mark("attn.norm", std::move(h));
    h = linear(run, std::move(h), kQkv, kQkv + 1);
    h = run.mark("attn.qkv", std::move(h));
    h = attention(run, std::move(h), heads_, heads_, dropout_);
    h = run.mark("attn.core", std::move(h));
    h = linear(run, std::move(h), kProjection, kProjection + 1);
    h = dropout(run, std::move(h), dropout_);
    h = run.mark("attn.out", std::move(h));
    Tensor mid = add(run, x, std::move(h));
    mid = run.mark("mid", std::move(mid));
    h = layer_norm(run, mid, kNorm2, kNorm2 + 1);
    h = run.mark("mlp.norm", std::move(h));
    h = linear(run, std::move(h), kUp, kUp + 1);
    h = run.mark("mlp.up", std::move(h));
    h = gelu(run, std::move(h));
    h = run.mark("mlp.act", std::move(h));
    h = linear(run, std::move(h), kDown, kDown + 1);
    h = dropout(run, std::move(h), dropout_);
    h = run.mark("mlp.down", std::move(h));
    h = add(run, std::move(mid), std::move(h));
    return {std::move(h)};
  }

  // Biases follow their weights.
  enum { kNorm1 = 0, kQkv = 2, kProjection = 4, kNorm2 = 6, kUp = 8, kDown = 10 };

 private:
  std::int64_t heads_;
  float dropout_;
};

// (x [B, T, C], targets [B, T]) -> token losses [B, T]
class Gpt2Head final : public Block {
 public:
  Activations forward(Run& run, const Activations& in) const override {
    Tensor h = layer_norm(run, in[0], kNorm, kNorm + 1);
    h = run.mark("head.norm", std::move(h));
    h = linear_cross_entropy(run, std::move(h), in[1], kOutput);
    return {std::move(h)};
  }

 private:
  enum { kNorm = 0, kOutput = 2 };  // kOutput: the embedding table when tied
};

UnitSpec block_unit(const ModelConfig& m, std::int64_t layer) {
  const std::int64_t c = m.hidden, f = m.ffn_hidden;
  const Init init = normal(m.init_std), residual = residual_init(m);
  const std::string h = fmt::format("h.{}.", layer);
  return {fmt::format("block {}", layer),
          {norm_gain(h + "ln_1.weight", c), bias(h + "ln_1.bias", c),  //
           weight(h + "attn.c_attn.weight", 3 * c, c, init), bias(h + "attn.c_attn.bias", 3 * c),
           weight(h + "attn.c_proj.weight", c, c, residual), bias(h + "attn.c_proj.bias", c),
           norm_gain(h + "ln_2.weight", c), bias(h + "ln_2.bias", c),  //
           weight(h + "mlp.c_fc.weight", f, c, init), bias(h + "mlp.c_fc.bias", f),
           weight(h + "mlp.c_proj.weight", c, f, residual), bias(h + "mlp.c_proj.bias", c)}};
}

// What model.lora.targets may name.
std::vector<LinearLayer> linear_layers(std::int64_t layer) {
  const std::string h = fmt::format("h.{}.", layer);
  return {{"attn.qkv", h + "attn.c_attn", Gpt2Block::kQkv},
          {"attn.proj", h + "attn.c_proj", Gpt2Block::kProjection},
          {"mlp.up", h + "mlp.c_fc", Gpt2Block::kUp},
          {"mlp.down", h + "mlp.c_proj", Gpt2Block::kDown}};
}

}  // namespace

Model make_gpt2(const ModelConfig& config) {
  ModelConfig m = config;
  if (m.ffn_hidden == 0) m.ffn_hidden = 4 * m.hidden;
  check_sizes(m);
  if (m.kv_heads != 0 && m.kv_heads != m.heads)
    throw UsageError(fmt::format("model.kv_heads: gpt2 has as many as model.heads ({}), not {}", m.heads, m.kv_heads));
  if (m.rope_theta != ModelConfig{}.rope_theta)
    throw UsageError(fmt::format("model.rope_theta: gpt2 learns its positions and cannot use {}", m.rope_theta));

  ModelBuilder build(m);
  build.original("transformer.", ModelBuilder::Matrices::Transposed);
  const Init init = normal(m.init_std);
  const int wte = build.unit({"wte", {weight("wte.weight", m.vocab, m.hidden, init)}});
  const int wpe = build.unit({"wpe", {weight("wpe.weight", m.max_sequence, m.hidden, init)}});
  build.embedding(std::make_unique<Gpt2Embedding>(m.dropout), {wte, wpe});
  for (std::int64_t i = 0; i < m.layers; ++i)
    build.block(std::make_unique<Gpt2Block>(m.heads, m.dropout), {build.unit(block_unit(m, i), linear_layers(i))});
  UnitSpec head{"head", {norm_gain("ln_f.weight", m.hidden), bias("ln_f.bias", m.hidden)}};
  if (!m.tie_embeddings) head.params.push_back(weight("lm_head.weight", m.vocab, m.hidden, init));
  std::vector<int> head_units{build.unit(std::move(head))};
  if (m.tie_embeddings) head_units.push_back(wte);
  build.head(std::make_unique<Gpt2Head>(), std::move(head_units));
  return std::move(build).finish();
}

}  // namespace regather
