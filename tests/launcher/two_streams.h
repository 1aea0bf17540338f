// A model whose blocks have several inputs and outputs: (x [B, T, C], z [B, T, C], tokens [B, T]) -> the same three.
// Two streams of activations read each other, and the tokens, which have no gradient, are read by an operation of every
// block and handed on as they came. The head reads the streams that it is told to; a stream that it does not read has
// no gradient in the last block.
#pragma once
#include <memory>

#include "model/build.h"
#include "tensor/ops/add.h"
#include "tensor/ops/dropout.h"
#include "tensor/ops/embedding.h"
#include "tensor/ops/gelu.h"
#include "tensor/ops/layer_norm.h"
#include "tensor/ops/linear.h"
#include "tensor/ops/linear_cross_entropy.h"
#include "tests/launcher/faulty_block.h"
#include "tests/launcher/training_run.h"

namespace regather::testing {

// y = x s(token), s = 1/2, 3/4 or 1. Saves the tokens alone. before: called at every execution, if it is there.
class ScaleByToken final : public Op {
 public:
  explicit ScaleByToken(std::function<void()> before = {}) : before_(std::move(before)) {}
  std::string_view name() const override { return "scale_by_token"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape>) const override {
    check(in[1].dtype == DType::I32, "scale_by_token: the second input has to be tokens");
    return {in[0]};
  }
  Saved saved(const Needs&) const override { return {.inputs = 2}; }
  void forward(const Call& call) const override {
    if (before_) before_();
    scale(call.out[0].fresh(), call.in[0], call.in[1]);
  }
  void backward(const BackwardCall& call) const override {
    check(!call.din[1], "scale_by_token: a gradient of tokens is wanted");
    if (call.din[0]) scale(call.din[0].fresh(), call.dout[0], call.in[1]);
  }

 private:
  std::function<void()> before_;
  static void scale(float* y, const Tensor& x, const Tensor& tokens) {
    const std::int64_t c = x.shape().cols();
    for (std::int64_t i = 0; i < x.numel(); ++i)
      y[i] = x.data()[i] * (0.5F + 0.25F * static_cast<float>(tokens.data<std::int32_t>()[i / c] % 3));
  }
};

class StreamsEmbedding final : public Block {
 public:
  Activations forward(Run& run, const Activations& in) const override {
    Tensor x = embedding(run, in[0], 0, 1);
    Tensor z = embedding(run, in[0], 2);
    return {std::move(x), std::move(z), in[0]};
  }
  bool differentiable(std::size_t) const override { return false; }
};

class StreamsBlock final : public Block {
 public:
  // after_norm: called after the first norm, at every execution.
  explicit StreamsBlock(float dropout, std::function<void()> after_norm = {})
      : dropout_(dropout), after_norm_(std::move(after_norm)) {}
  Activations forward(Run& run, const Activations& in) const override {
    const Tensor &x = in[0], &tokens = in[2];
    Tensor h = layer_norm(run, x, 0, 1);
    h = run.mark("a.norm", std::move(h));
    h = run.apply(std::make_unique<ScaleByToken>(after_norm_), {std::move(h), tokens})[0];
    h = run.mark("a.scaled", std::move(h));
    h = linear(run, std::move(h), 2, 3);
    h = run.mark("a.up", std::move(h));
    h = gelu(run, std::move(h));
    h = dropout(run, std::move(h), dropout_);
    h = run.mark("a.act", std::move(h));
    Tensor z = add(run, in[1], std::move(h));
    z = run.mark("z", std::move(z));
    h = layer_norm(run, z, 4, 5);
    h = run.mark("b.norm", std::move(h));
    h = linear(run, std::move(h), 6, 7);
    h = gelu(run, std::move(h));
    h = run.mark("b.act", std::move(h));
    Tensor y = add(run, x, std::move(h));
    return {std::move(y), std::move(z), tokens};
  }
  bool differentiable(std::size_t input) const override { return input < 2; }

 private:
  float dropout_;
  std::function<void()> after_norm_;
};

// (x, z, tokens, targets) -> token losses
class StreamsHead final : public Block {
 public:
  enum class Reads { Both, First };
  explicit StreamsHead(Reads reads) : reads_(reads) {}
  Activations forward(Run& run, const Activations& in) const override {
    Tensor h = in[0];
    if (reads_ == Reads::Both) h = add(run, std::move(h), in[1]);
    h = layer_norm(run, std::move(h), 0, 1);
    h = linear_cross_entropy(run, std::move(h), in[3], 2);
    return {std::move(h)};
  }
  bool differentiable(std::size_t input) const override { return input < 2; }

 private:
  Reads reads_;
};

inline std::vector<ParamInfo> streams_block_params(const std::string& prefix, std::int64_t c) {
  return {norm_gain(prefix + "a.norm.weight", c),          bias(prefix + "a.norm.bias", c),
          weight(prefix + "a.weight", c, c, normal(0.3F)), bias(prefix + "a.bias", c),
          norm_gain(prefix + "b.norm.weight", c),          bias(prefix + "b.norm.bias", c),
          weight(prefix + "b.weight", c, c, normal(0.3F)), bias(prefix + "b.bias", c)};
}

inline Model make_two_streams(const ModelConfig& m, StreamsHead::Reads reads = StreamsHead::Reads::Both) {
  ModelBuilder build(m);
  const int wte = build.unit({"wte", {weight("wte.weight", m.vocab, m.hidden, normal(0.2F))}});
  const int positions = build.unit({"wpe", {weight("wpe.weight", m.max_sequence, m.hidden, normal(0.2F))}});
  const int second = build.unit({"wze", {weight("wze.weight", m.vocab, m.hidden, normal(0.2F))}});
  build.embedding(std::make_unique<StreamsEmbedding>(), {wte, positions, second});
  for (std::int64_t i = 0; i < m.layers; ++i)
    build.block(std::make_unique<StreamsBlock>(m.dropout),
                {build.unit({fmt::format("block {}", i), streams_block_params(fmt::format("h.{}.", i), m.hidden)})});
  const int head = build.unit({"head", {norm_gain("ln_f.weight", m.hidden), bias("ln_f.bias", m.hidden)}});
  build.head(std::make_unique<StreamsHead>(reads), {head, wte});
  return std::move(build).finish();
}

inline RunSetup two_streams(StreamsHead::Reads reads = StreamsHead::Reads::Both) {
  RunSetup s;
  s.make = [reads](const RunSetup& of, int) { return make_two_streams(of.model, reads); };
  return s;
}

}  // namespace regather::testing
