// A transformer block of toy operations: (x [N, C], doc [N, 1]) -> (y [N, C], doc), and its table of parameters.
#pragma once
#include "tests/tensor/toy_ops.h"

namespace regather::toy {

class ToyBlock : public Block {
 public:
  enum { kNorm1 = 0, kQkv = 2, kProj = 4, kNorm2 = 6, kUp = 8, kDown = 10 };  // biases follow their weights

  explicit ToyBlock(float dropout = 0) : dropout_(dropout) {}
  Activations forward(Run& r, const Activations& in) const override {
    const Tensor &x = in[0], &doc = in[1];
    Tensor h = norm(r, x, kNorm1);
    h = linear(r, h, kQkv);
    h = r.mark("attn.qkv", h);
    h = attention(r, h, doc);
    h = r.mark("attn.core", h);
    h = linear(r, h, kProj);
    h = dropout(r, h, dropout_);
    h = r.mark("attn.out", h);
    Tensor mid = add(r, x, h);
    mid = r.mark("mid", mid);
    h = norm(r, mid, kNorm2);
    h = linear(r, h, kUp);
    h = r.mark("mlp.up", h);
    h = silu(r, h);
    h = linear(r, h, kDown);
    h = dropout(r, h, dropout_);
    h = add(r, mid, h);
    return {h, doc};
  }

 private:
  float dropout_;
};

// prefix: of the names ("h.0."). frozen_linears: only the norms are trained.
inline std::vector<ParamInfo> toy_block_params(const std::string& prefix, std::int64_t c, std::int64_t f,
                                               bool frozen_linears) {
  const auto gain = [&](const char* name, std::int64_t n) {
    return ParamInfo{.name = prefix + name, .shape = {n}, .init = ones(), .decay = false};
  };
  const auto bias = [&](const char* name, std::int64_t n, bool trainable) {
    return ParamInfo{.name = prefix + name, .shape = {n}, .init = normal(0.1F), .decay = false, .trainable = trainable};
  };
  const auto weight = [&](const char* name, std::int64_t out, std::int64_t in) {
    return ParamInfo{.name = prefix + name, .shape = {out, in}, .init = normal(0.4F), .trainable = !frozen_linears};
  };
  const bool t = !frozen_linears;
  return {gain("norm1.gain", c),      bias("norm1.bias", c, true), weight("qkv.weight", 3 * c, c),
          bias("qkv.bias", 3 * c, t), weight("proj.weight", c, c), bias("proj.bias", c, t),
          gain("norm2.gain", c),      bias("norm2.bias", c, true), weight("up.weight", f, c),
          bias("up.bias", f, t),      weight("down.weight", c, f), bias("down.bias", c, t)};
}

}  // namespace regather::toy
