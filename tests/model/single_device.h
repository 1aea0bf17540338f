// A model on one device, whole: what model tests run. No shards, no gathers: every unit's parameters and gradients are
// there in full, so that nothing but model and operations is under test.
#pragma once
#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tensor/block.h"

namespace regather::testing {

// A unit's parameters and gradients, flat, one parameter after the other.
class WholeUnit final : public ParamSource {
 public:
  WholeUnit(const UnitSpec& spec, std::uint64_t seed) : table_(spec.params) {
    for (const ParamInfo& param : table_) {
      offsets_.push_back(elements_);
      elements_ += param.shape.numel();
    }
    values_.resize(static_cast<std::size_t>(elements_));
    for (std::size_t i = 0; i < table_.size(); ++i)
      initialize(table_[i], seed, 0, table_[i].shape.numel(), values_.data() + offsets_[i]);
  }
  const std::vector<ParamInfo>& table() const override { return table_; }
  const void* data(int i) override { return values(i).data(); }
  DType dtype() const override { return DType::F32; }

  std::span<float> values(int i) {
    const auto k = static_cast<std::size_t>(i);
    return {values_.data() + offsets_[k], static_cast<std::size_t>(table_[k].shape.numel())};
  }
  std::span<const float> gradient(int i) const {
    const auto k = static_cast<std::size_t>(i);
    return {gradients->flat() + offsets_[k], static_cast<std::size_t>(table_[k].shape.numel())};
  }
  void clear_gradients(Device& device) {
    std::vector<std::int64_t> offsets = offsets_;
    for (std::size_t i = 0; i < table_.size(); ++i)
      if (!table_[i].trainable) offsets[i] = -1;
    gradients.reset();
    gradients = std::make_unique<UnitGradients>(device, std::move(offsets), elements_, Tag::Gradients);
  }

  std::unique_ptr<UnitGradients> gradients;

 private:
  std::vector<ParamInfo> table_;
  std::vector<std::int64_t> offsets_;
  std::int64_t elements_ = 0;
  std::vector<float> values_;
};

class SingleDevice {
 public:
  SingleDevice(Model model, std::uint64_t seed) : model_(std::move(model)) {
    for (const UnitSpec& spec : model_.units) units.push_back(std::make_unique<WholeUnit>(spec, seed));
  }

  // Forward and backward, one tape a part. Returns the mean token loss; the gradients are left in the units.
  double step(const Tensor& tokens, const Tensor& targets, const SavePlan& plan = keep_all(), const RngKey& key = {}) {
    for (auto& unit : units) unit->clear_gradients(device);
    std::vector<std::unique_ptr<Tape>> tapes;
    Activations x = forward(model_.embedding, {tokens}, plan, key, tapes);
    for (const Part& part : model_.blocks) x = forward(part, std::move(x), plan, key, tapes);
    x.push_back(targets);
    const Activations losses = forward(model_.head, std::move(x), plan, key, tapes);
    Tensor scale(device.memory, losses[0].shape(), Tag::Workspace);
    std::fill_n(scale.fresh(), scale.numel(), 1.0F / static_cast<float>(scale.numel()));
    Activations dy = backward(model_.head, *tapes.back(), {std::move(scale)});
    dy.resize(1);
    for (std::size_t i = model_.blocks.size(); i-- > 0;) dy = backward(model_.blocks[i], *tapes[i + 1], std::move(dy));
    backward(model_.embedding, *tapes.front(), std::move(dy));
    return mean(losses[0]);
  }

  // The same without a tape.
  double evaluate(const Tensor& tokens, const Tensor& targets) {
    Activations x = run(model_.embedding, {tokens}, nullptr, {});
    for (const Part& part : model_.blocks) x = run(part, x, nullptr, {});
    x.push_back(targets);
    return mean(run(model_.head, x, nullptr, {})[0]);
  }

  // What a forward of a part records, given its inputs.
  std::vector<Tape::ValueReport> record(const Part& part, Activations in) {
    std::vector<std::unique_ptr<Tape>> tapes;
    forward(part, std::move(in), keep_all(), {}, tapes);
    return tapes.front()->report();
  }

  const Model& model() const { return model_; }

  CpuDevice device;
  std::vector<std::unique_ptr<WholeUnit>> units;

 private:
  static double mean(const Tensor& losses) {
    double sum = 0;
    for (std::int64_t i = 0; i < losses.numel(); ++i) sum += static_cast<double>(losses.data()[i]);
    return sum / static_cast<double>(losses.numel());
  }
  ParamView view(const Part& part) {
    ParamView params;
    for (int u : part.units) params.append(*units[static_cast<std::size_t>(u)]);
    return params;
  }
  Activations run(const Part& part, const Activations& in, Tape* tape, const RngKey& key) {
    const ParamView params = view(part);
    Run here{device, params, tape, key};
    return part.block->forward(here, in);
  }
  Activations forward(const Part& part, Activations in, const SavePlan& plan, RngKey key,
                      std::vector<std::unique_ptr<Tape>>& tapes) {
    key.block = tapes.size();
    Tape& tape = *tapes.emplace_back(std::make_unique<Tape>(device, plan, key));
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = tape.input(std::move(in[i]), part.block->differentiable(i));
    Activations out = run(part, in, &tape, key);
    tape.outputs(out);
    return out;
  }
  Activations backward(const Part& part, Tape& tape, Activations dy) {
    Gradients gradients;
    for (int u : part.units) {
      WholeUnit& unit = *units[static_cast<std::size_t>(u)];
      gradients.append(*unit.gradients, static_cast<int>(unit.table().size()));
    }
    return tape.backward(view(part), std::move(dy), gradients);
  }

  Model model_;
};

}  // namespace regather::testing
