// An operation of two outputs for tests of graphs and rules, and what misbehaves on demand.
#pragma once
#include <algorithm>
#include <memory>
#include <stdexcept>
#include <vector>

#include "tests/tensor/one_tape.h"

namespace regather::toy {

using Types = std::vector<ValueType>;
using In = std::span<const ValueType>;
using Params = std::span<const Shape>;

// x -> (x * x, 2 x). Saves x. What it does besides is set from outside: that is what breaks the rules.
struct Switches {
  int throw_at = 0;  // the n-th forward from now throws
  int forwards = 0;
  bool noisy = false;  // numbers depend on how often it ran
  bool grows = false;  // so does the shape
};
struct Split final : Op {
  explicit Split(Switches* switches = nullptr) : switches_(switches) {}
  std::string_view name() const override { return "split"; }
  Types outputs(In in, Params) const override {
    const bool wider = switches_ && switches_->grows && switches_->forwards > 0;
    return {wider ? ValueType{in[0].shape.with_last(in[0].shape.cols() + 1)} : in[0], in[0]};
  }
  Saved saved(const Needs&) const override { return {.inputs = 1, .outputs = 0}; }
  void forward(const Call& k) const override {
    const float noise = switches_ && switches_->noisy ? static_cast<float>(switches_->forwards) : 0.0F;
    if (switches_) ++switches_->forwards;
    if (switches_ && switches_->throw_at > 0 && --switches_->throw_at == 0) throw std::runtime_error("split failed");
    for (std::int64_t i = 0; i < k.in[0].numel(); ++i) {
      const float x = k.in[0].data()[i];
      k.out[0].fresh()[i] = x * x + noise;
      k.out[1].fresh()[i] = 2 * x;
    }
  }
  void backward(const BackwardCall& k) const override {
    for (std::int64_t i = 0; i < k.in[0].numel(); ++i) {
      const float a = k.dout[0] ? k.dout[0].data()[i] : 0, b = k.dout[1] ? k.dout[1].data()[i] : 0;
      k.din[0].fresh()[i] = 2 * k.in[0].data()[i] * a + 2 * b;
    }
  }

 private:
  Switches* switches_;
};
inline Activations split(Run& r, Tensor x, Switches* s = nullptr) {
  return r.apply(std::make_unique<Split>(s), {std::move(x)});
}

inline constexpr std::int64_t kThree = 3;
inline Shape row(std::int64_t n = kThree) { return {1, n}; }

}  // namespace regather::toy
