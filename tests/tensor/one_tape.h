// One tape on one device, with parameters that are always there: what the tests of the tape run.
#pragma once
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/message_of.h"
#include "tests/tensor/toy_block.h"

namespace regather::toy {

using Floats = std::vector<float>;
using Counts = std::map<std::string, int, std::less<>>;

inline Floats values(const Tensor& t) { return {t.data(), t.data() + t.numel()}; }

// Parameters in ordinary memory. The first read of a matrix in a run writes the line "wait": there a gather would be
// waited for (1-D parameters stay behind: dist/shard_unit.h).
class ToyParams final : public ParamSource {
 public:
  ToyParams(std::vector<ParamInfo> table, Device& device) : table_(std::move(table)), device_(device) {
    for (const ParamInfo& p : table_) {
      values_.emplace_back(static_cast<std::size_t>(p.shape.numel()));
      initialize(p, 1, 0, p.shape.numel(), values_.back().data());
    }
  }
  const std::vector<ParamInfo>& table() const override { return table_; }
  const void* data(int i) override {
    const bool vector = table_[static_cast<std::size_t>(i)].shape.ndim() == 1;
    if (device_.trace && !vector && !std::exchange(waited_, true)) device_.trace->line("wait");
    return values_[static_cast<std::size_t>(i)].data();
  }
  DType dtype() const override { return DType::F32; }
  void gather_again() { waited_ = false; }

 private:
  std::vector<ParamInfo> table_;
  std::vector<Floats> values_;
  Device& device_;
  bool waited_ = false;
};

struct OneTape {
  explicit OneTape(std::vector<ParamInfo> table = {}, Allocator::Mode mode = Allocator::Mode::Real)
      : device(mode), source(std::move(table), device), params(source) {
    std::vector<std::int64_t> offsets;
    std::int64_t elements = 0;
    for (const ParamInfo& p : source.table()) {
      offsets.push_back(p.trainable ? elements : -1);
      if (p.trainable) elements += p.shape.numel();
    }
    unit.emplace(device, std::move(offsets), elements, Tag::Gradients);
    grads.append(*unit, static_cast<int>(source.table().size()));
    trace.keep_lines = true;
    device.trace = &trace;
  }
  Tensor activation(const Shape& shape, std::uint64_t seed) { return filled(device, shape, Tag::Activations, seed); }
  Tensor gradient(const Shape& shape, std::uint64_t seed) { return filled(device, shape, Tag::Workspace, seed); }
  Run recording(Tape& tape) { return {device, params, &tape}; }
  Run evaluating(const RngKey& key = {}) { return {device, params, nullptr, key}; }
  Floats parameter_gradients() const {
    return device.meta() ? Floats() : Floats(unit->flat(), unit->flat() + unit->elements());
  }
  std::int64_t live(Tag tag = Tag::Activations) const { return device.memory.live(tag); }
  std::int64_t peak(Tag tag = Tag::Activations) const { return device.memory.peak(tag); }

  CpuDevice device;
  Offloader offloader{device};
  Trace trace;
  ToyParams source;
  ParamView params;
  std::optional<UnitGradients> unit;
  Gradients grads;
};

inline SavePlan with(SavePlan plan, Order order) {
  plan.order = order;
  return plan;
}
inline SavePlan verified(SavePlan plan) {
  plan.verify = true;
  return plan;
}

}  // namespace regather::toy
