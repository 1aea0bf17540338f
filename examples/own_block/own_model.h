// A model of one's own: GPT-2 with a squared ReLU (So et al., 2021) in place of its GELU. An operation, and a block
// that uses it. It knows no rank, no shard, no checkpoint policy.
#pragma once
#include "model/gpt2.h"
#include "tensor/ops/add.h"
#include "tensor/ops/attention.h"
#include "tensor/ops/checks.h"
#include "tensor/ops/dropout.h"
#include "tensor/ops/layer_norm.h"
#include "tensor/ops/linear.h"
#include "tensor/ops/parallel.h"

namespace own {
using namespace regather;

// y = max(x, 0)^2,  dx = 2 max(x, 0) dy.  Saves x: everything else follows from it.
class SquaredRelu final : public Op {
 public:
  std::string_view name() const override { return "squared_relu"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape> params) const override {
    check_counts(name(), in, 1, params, 0);
    check_fp32(name(), "x", in[0]);
    return {in[0]};
  }
  Saved saved(const Needs&) const override { return {.inputs = 1}; }  // bit 0: x
  double flops(std::span<const ValueType> in, std::span<const Shape>) const override {
    return 2.0 * static_cast<double>(in[0].shape.numel());
  }
  void forward(const Call& c) const override {
    map(c.in[0], c.out[0], [](float x, auto) { return x * x; });
  }
  void backward(const BackwardCall& c) const override {
    const float* dy = c.dout[0].data();
    if (c.din[0]) map(c.in[0], c.din[0], [dy](float x, std::int64_t i) { return 2 * x * dy[i]; });
  }
  static void map(const Tensor& from, Tensor& to, auto f) {
    parallel_blocks(from.numel(), kElementGrain, [f, x = from.data(), y = to.fresh()](auto begin, auto end) {
      for (auto i = begin; i < end; ++i) y[i] = f(std::max(x[i], 0.0F), i);
    });
  }
};

class OwnBlock final : public Block {  // x [B, T, C] -> [B, T, C]
 public:
  OwnBlock(std::int64_t heads, float dropout) : heads_(heads), dropout_(dropout) {}
  Activations forward(Run& run, const Activations& in) const override {
    Tensor h = layer_norm(run, in[0], kNorm1, kNorm1 + 1);
    h = linear(run, std::move(h), kQkv, kQkv + 1);
    h = attention(run, std::move(h), heads_, heads_, dropout_);
    h = linear(run, std::move(h), kProjection, kProjection + 1);
    h = dropout(run, std::move(h), dropout_);
    Tensor mid = add(run, in[0], std::move(h));
    h = layer_norm(run, mid, kNorm2, kNorm2 + 1);
    h = linear(run, std::move(h), kUp, kUp + 1);
    h = run.apply(std::make_unique<SquaredRelu>(), {std::move(h)})[0];
    h = run.mark("mlp.act", std::move(h));  // a name, by which a policy can keep it
    h = linear(run, std::move(h), kDown, kDown + 1);
    h = dropout(run, std::move(h), dropout_);
    return {add(run, std::move(mid), std::move(h))};
  }

 private:  // the parameters are GPT-2's, numbered in the order of their unit; biases follow their weights
  enum { kNorm1 = 0, kQkv = 2, kProjection = 4, kNorm2 = 6, kUp = 8, kDown = 10 };
  std::int64_t heads_;
  float dropout_;
};

inline Model make_own(const ModelConfig& config) {
  Model model = make_gpt2(config);
  for (Part& part : model.blocks) part.block = std::make_unique<OwnBlock>(config.heads, config.dropout);
  return model;
}

}  // namespace own
