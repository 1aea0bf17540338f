// A model's block with a fault: an operation in front of it that does something at one step on one rank. Elsewhere it
// hands its input on.
#pragma once
#include <functional>
#include <memory>

#include "tensor/block.h"

namespace regather::testing {

// Called with the values of the block's input in forward, at every execution (reruns too). step: from 0.
using Fault = std::function<void(std::uint64_t step, float* values, std::int64_t n)>;

class FaultOp final : public Op {
 public:
  explicit FaultOp(Fault fault) : fault_(std::move(fault)) {}
  std::string_view name() const override { return "fault"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape>) const override {
    return {in[0]};
  }
  Saved saved(const Needs&) const override { return {}; }
  void forward(const Call& call) const override {
    float* y = call.out[0].fresh();
    std::copy_n(call.in[0].data(), call.in[0].numel(), y);
    fault_(call.key.step, y, call.in[0].numel());
  }
  void backward(const BackwardCall& call) const override {
    std::copy_n(call.dout[0].data(), call.dout[0].numel(), call.din[0].fresh());
  }

 private:
  Fault fault_;
};

class FaultyBlock final : public Block {
 public:
  FaultyBlock(std::unique_ptr<const Block> inner, Fault fault) : inner_(std::move(inner)), fault_(std::move(fault)) {}
  Activations forward(Run& run, const Activations& in) const override {
    Activations x = in;
    x[0] = run.apply(std::make_unique<FaultOp>(fault_), {in[0]})[0];
    return inner_->forward(run, x);
  }
  bool differentiable(std::size_t input) const override { return inner_->differentiable(input); }

 private:
  std::unique_ptr<const Block> inner_;
  Fault fault_;
};

inline void put_fault(Model& model, std::size_t block, Fault fault) {
  auto& part = model.blocks.at(block).block;
  part = std::make_unique<FaultyBlock>(std::move(part), std::move(fault));
}

}  // namespace regather::testing
