// Small operations with plain loops, and a block in the shape of a transformer's, for tests of the tape and of what
// runs it. They share no code with the operations of the library, so that closed forms in tests follow from this page
// alone. Each says what it saves. Shapes: x [N, C], weights [O, C]. The whole of a tensor is one sequence for random
// numbers.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tensor/block.h"

namespace regather::toy {

// Numbers in [-0.5, 0.5), the same for the same seed; none in a meta run.
inline Tensor filled(Device& device, const Shape& shape, Tag tag, std::uint64_t seed) {
  Tensor t(device.memory, shape, tag);
  for (std::int64_t i = 0; !device.meta() && i < t.numel(); ++i) {
    const PhiloxBlock words = RngKey{.seed = seed}.quad(0, static_cast<std::uint64_t>(i));
    t.fresh()[i] = static_cast<float>(words[0] >> 8) * 0x1p-24F - 0.5F;
  }
  return t;
}

// y = (x - mean) / std * gain + bias. Saves x: mean and deviation are cheap to compute again.
struct Norm final : Op {
  std::string_view name() const override { return "norm"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape>) const override {
    return {in[0]};
  }
  Saved saved(const Needs&) const override { return {.inputs = 1, .outputs = 0}; }
  bool cheap() const override { return true; }
  double flops(std::span<const ValueType> in, std::span<const Shape>) const override {
    return 8.0 * static_cast<double>(in[0].shape.numel());
  }
  static std::pair<float, float> moments(const float* x, std::int64_t c) {
    float mean = 0, variance = 0;
    for (std::int64_t j = 0; j < c; ++j) mean += x[j] / static_cast<float>(c);
    for (std::int64_t j = 0; j < c; ++j) variance += (x[j] - mean) * (x[j] - mean) / static_cast<float>(c);
    return {mean, 1.0F / std::sqrt(variance + 1e-5F)};
  }
  void forward(const Call& k) const override {
    const std::int64_t c = k.in[0].shape().cols();
    const float *gain = k.param(0), *bias = k.param(1);
    for (std::int64_t i = 0; i < k.in[0].shape().rows(); ++i) {
      const float* x = k.in[0].data() + i * c;
      const auto [mean, r] = moments(x, c);
      for (std::int64_t j = 0; j < c; ++j) k.out[0].fresh()[i * c + j] = (x[j] - mean) * r * gain[j] + bias[j];
    }
  }
  void backward(const BackwardCall& k) const override {
    const std::int64_t c = k.in[0].shape().cols();
    const float* gain = k.param(0);
    float *dgain = k.dparam(0), *dbias = k.dparam(1);
    for (std::int64_t i = 0; i < k.in[0].shape().rows(); ++i) {
      const float *x = k.in[0].data() + i * c, *dy = k.dout[0].data() + i * c;
      const auto [mean, r] = moments(x, c);
      float sum = 0, dot = 0;
      for (std::int64_t j = 0; j < c; ++j) {
        const float h = (x[j] - mean) * r;
        sum += dy[j] * gain[j];
        dot += dy[j] * gain[j] * h;
        if (dgain) dgain[j] += dy[j] * h;
        if (dbias) dbias[j] += dy[j];
      }
      if (!k.din[0]) continue;
      float* dx = k.din[0].fresh() + i * c;
      for (std::int64_t j = 0; j < c; ++j)
        dx[j] = r * (dy[j] * gain[j] - (sum + (x[j] - mean) * r * dot) / static_cast<float>(c));
    }
  }
};

// y = x w^T + bias. Saves x only if w is trained.
struct Linear final : Op {
  std::string_view name() const override { return "linear"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape> params) const override {
    check(in[0].shape.cols() == params[0].cols(), "linear: x is {}, weight is {}", in[0].shape.to_string(),
          params[0].to_string());
    return {{in[0].shape.with_last(params[0].rows())}};
  }
  Saved saved(const Needs& needs) const override { return {.inputs = needs.params & 1U, .outputs = 0}; }
  double flops(std::span<const ValueType> in, std::span<const Shape> params) const override {
    return 2.0 * static_cast<double>(in[0].shape.numel() * params[0].rows());
  }
  void forward(const Call& k) const override {
    const std::int64_t c = k.in[0].shape().cols(), outs = k.out[0].shape().cols();
    const float *w = k.param(0), *bias = k.param(1), *x = k.in[0].data();
    for (std::int64_t i = 0; i < k.out[0].shape().rows(); ++i)
      for (std::int64_t o = 0; o < outs; ++o) {
        float sum = bias[o];
        for (std::int64_t j = 0; j < c; ++j) sum += x[i * c + j] * w[o * c + j];
        k.out[0].fresh()[i * outs + o] = sum;
      }
  }
  void backward(const BackwardCall& k) const override {
    const std::int64_t rows = k.dout[0].shape().rows(), c = k.param_shape(0).cols(), outs = k.param_shape(0).rows();
    const float *w = k.param(0), *dy = k.dout[0].data();
    float *dw = k.dparam(0), *dbias = k.dparam(1), *dx = k.din[0] ? k.din[0].fresh() : nullptr;
    if (dx) std::fill_n(dx, rows * c, 0.0F);
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t o = 0; o < outs; ++o) {
        const float d = dy[i * outs + o];
        if (dbias) dbias[o] += d;
        for (std::int64_t j = 0; j < c; ++j) {
          if (dw) dw[o * c + j] += d * k.in[0].data()[i * c + j];
          if (dx) dx[i * c + j] += d * w[o * c + j];
        }
      }
  }
};

// (qkv [N, 3C], doc [N, 1]) -> (y [N, C], lse [N, 1]): one causal head, tokens attend inside a document. Saves
// everything: a probability is exp(score - lse). lse is an output that only backward reads; the scores are workspace.
struct Attention final : Op {
  std::string_view name() const override { return "attention"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape>) const override {
    return {{in[0].shape.with_last(in[0].shape.cols() / 3)}, {in[0].shape.with_last(1)}};
  }
  Saved saved(const Needs&) const override { return {.inputs = kAll, .outputs = kAll}; }
  std::int64_t workspace(DeviceKind, Direction, std::span<const ValueType> in, std::span<const Shape>) const override {
    return in[0].shape.rows() * static_cast<std::int64_t>(sizeof(float));
  }
  double flops(std::span<const ValueType> in, std::span<const Shape>) const override {
    return static_cast<double>(in[0].shape.rows() * in[0].shape.numel());
  }
  template <class F>
  static void rows(const Call& k, F f) {  // f(t, C) with the scores of row t in the workspace
    const std::int64_t c = k.in[0].shape().cols() / 3;
    const float *qkv = k.in[0].data(), *doc = k.in[1].data();
    for (std::int64_t t = 0; t < k.in[0].shape().rows(); ++t) {
      for (std::int64_t s = 0; s <= t; ++s) {
        float sum = 0;
        for (std::int64_t j = 0; j < c; ++j) sum += qkv[t * 3 * c + j] * qkv[s * 3 * c + c + j];
        k.workspace[s] = doc[s] == doc[t] ? sum / std::sqrt(static_cast<float>(c)) : -1e30F;
      }
      f(t, c);
    }
  }
  void forward(const Call& k) const override {
    rows(k, [&](std::int64_t t, std::int64_t c) {
      const float top = *std::max_element(k.workspace, k.workspace + t + 1);
      float sum = 0;
      for (std::int64_t s = 0; s <= t; ++s) sum += std::exp(k.workspace[s] - top);
      const float lse = k.out[1].fresh()[t] = top + std::log(sum);
      float* y = k.out[0].fresh() + t * c;
      std::fill_n(y, c, 0.0F);
      for (std::int64_t s = 0; s <= t; ++s)
        for (std::int64_t j = 0; j < c; ++j)
          y[j] += std::exp(k.workspace[s] - lse) * k.in[0].data()[s * 3 * c + 2 * c + j];
    });
  }
  void backward(const BackwardCall& k) const override {
    check(!k.dout[1], "attention: lse is not differentiable");
    float* dx = k.din[0].fresh();
    std::fill_n(dx, k.din[0].numel(), 0.0F);
    const float *qkv = k.in[0].data(), *y = k.out[0].data(), *lse = k.out[1].data(), *dy = k.dout[0].data();
    rows(k, [&](std::int64_t t, std::int64_t c) {
      float dot = 0;
      for (std::int64_t j = 0; j < c; ++j) dot += dy[t * c + j] * y[t * c + j];
      for (std::int64_t s = 0; s <= t; ++s) {
        const std::int64_t row = t * 3 * c, col = s * 3 * c;
        const float p = std::exp(k.workspace[s] - lse[t]);
        float dp = 0;
        for (std::int64_t j = 0; j < c; ++j) dp += dy[t * c + j] * qkv[col + 2 * c + j];
        const float ds = p * (dp - dot) / std::sqrt(static_cast<float>(c));
        for (std::int64_t j = 0; j < c; ++j) {
          dx[col + 2 * c + j] += p * dy[t * c + j];
          dx[row + j] += ds * qkv[col + c + j];
          dx[col + c + j] += ds * qkv[row + j];
        }
      }
    });
  }
};

// y = x sigmoid(x). Saves x.
struct Silu final : Op {
  std::string_view name() const override { return "silu"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape>) const override {
    return {in[0]};
  }
  Saved saved(const Needs&) const override { return {.inputs = 1, .outputs = 0}; }
  bool cheap() const override { return true; }
  double flops(std::span<const ValueType> in, std::span<const Shape>) const override {
    return 10.0 * static_cast<double>(in[0].shape.numel());
  }
  static float sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }
  void forward(const Call& k) const override {
    for (std::int64_t i = 0; i < k.in[0].numel(); ++i)
      k.out[0].fresh()[i] = k.in[0].data()[i] * sigmoid(k.in[0].data()[i]);
  }
  void backward(const BackwardCall& k) const override {
    for (std::int64_t i = 0; i < k.in[0].numel(); ++i) {
      const float x = k.in[0].data()[i], s = sigmoid(x);
      k.din[0].fresh()[i] = k.dout[0].data()[i] * s * (1 + x * (1 - s));
    }
  }
};

// Saves nothing: backward makes the same mask again from the key.
struct Dropout final : Op {
  explicit Dropout(float rate) : rate_(rate) {}
  std::string_view name() const override { return "dropout"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape>) const override {
    return {in[0]};
  }
  Saved saved(const Needs&) const override { return {}; }
  void forward(const Call& k) const override { apply(k.key, k.in[0], k.out[0]); }
  void backward(const BackwardCall& k) const override { apply(k.key, k.dout[0], k.din[0]); }

 private:
  void apply(const RngKey& key, const Tensor& from, const Tensor& to) const {
    Tensor y = to;
    for (std::int64_t i = 0; i < from.numel(); ++i) {
      const auto e = static_cast<std::uint64_t>(i);
      const bool kept = static_cast<float>(key.quad(0, e / 4)[e % 4] >> 8) * 0x1p-24F >= rate_;
      y.fresh()[i] = kept ? from.data()[i] / (1 - rate_) : 0.0F;
    }
  }
  float rate_;
};

// y = a + b. Saves nothing; the gradient is passed on, not copied.
struct Add final : Op {
  std::string_view name() const override { return "add"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape>) const override {
    check(in[0].shape == in[1].shape, "add: a is {}, b is {}", in[0].shape.to_string(), in[1].shape.to_string());
    return {in[0]};
  }
  Saved saved(const Needs&) const override { return {}; }
  bool passes_gradient() const override { return true; }
  void forward(const Call& k) const override {
    for (std::int64_t i = 0; i < k.in[0].numel(); ++i) k.out[0].fresh()[i] = k.in[0].data()[i] + k.in[1].data()[i];
  }
  void backward(const BackwardCall&) const override {}
};

inline Tensor norm(Run& r, Tensor x, int p) { return r.apply(std::make_unique<Norm>(), {std::move(x)}, {p, p + 1})[0]; }
inline Tensor linear(Run& r, Tensor x, int p) {
  return r.apply(std::make_unique<Linear>(), {std::move(x)}, {p, p + 1})[0];
}
inline Tensor attention(Run& r, Tensor qkv, Tensor doc) {
  return r.apply(std::make_unique<Attention>(), {std::move(qkv), std::move(doc)})[0];
}
inline Tensor silu(Run& r, Tensor x) { return r.apply(std::make_unique<Silu>(), {std::move(x)})[0]; }
inline Tensor dropout(Run& r, Tensor x, float rate) {
  return rate > 0 ? r.apply(std::make_unique<Dropout>(rate), {std::move(x)})[0] : x;
}
inline Tensor add(Run& r, Tensor a, Tensor b) {
  return r.apply(std::make_unique<Add>(), {std::move(a), std::move(b)})[0];
}

}  // namespace regather::toy
