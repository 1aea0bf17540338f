#include "dist/optimizer.h"

#include <algorithm>
#include <numeric>

#include "tensor/ops/optimizer.h"
#include "tensor/recorder.h"

namespace regather {
namespace {

using Pieces = std::vector<ShardUnit::OwnedPiece> (ShardUnit::*)() const;

template <class States>
Recorder::Interval interval(const char* name, double bytes, const States& states, Pieces pieces) {
  std::int64_t elements = 0;
  for (const auto& state : states)
    for (const ShardUnit::OwnedPiece& piece : (state.unit->*pieces)()) elements += piece.size;
  return {
      .activity = Recorder::Activity::Update, .name = name, .work = {.bytes = bytes * static_cast<double>(elements)}};
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(std::span<const std::unique_ptr<ShardUnit>> units, Device& device,
                                   const OptimizerOptions& options)
    : device_(device), options_(options) {
  for (const auto& unit : units) {
    State state{unit.get(), {}, {}};
    if (options_.type == OptimizerOptions::Type::AdamW) {
      const Allocator::Asking asking(device.memory, unit->name());
      const std::int64_t bytes = unit->state_elements() * static_cast<std::int64_t>(sizeof(float));
      state.first = Buffer(device.memory, bytes, Tag::Optimizer);
      state.second = Buffer(device.memory, bytes, Tag::Optimizer);
      device.zero(Stream::Compute, state.first.data(), bytes);
      device.zero(Stream::Compute, state.second.data(), bytes);
    }
    states_.push_back(std::move(state));
  }
}

void ShardedOptimizer::step(double lr, double gradient_scale, std::int64_t step) {
  const bool is_sgd = options_.type == OptimizerOptions::Type::Sgd;
  const Timed timed(device_.recorder, [&] {
    return interval(is_sgd ? "sgd" : "adamw", is_sgd ? kSgdBytes : kAdamwBytes, states_, &ShardUnit::updated);
  });
  if (device_.meta()) return;
  for (State& state : states_)
    for (const ShardUnit::OwnedPiece& piece : state.unit->updated()) {
      const bool decays = state.unit->table()[static_cast<std::size_t>(piece.param)].decay;
      const float decay = decays ? static_cast<float>(options_.weight_decay) : 0.0F;
      const auto rate = static_cast<float>(lr), scale = static_cast<float>(gradient_scale);
      if (is_sgd) {
        sgd(device_, piece.value, nullptr, piece.gradient, piece.size,
            {.lr = rate, .weight_decay = decay, .gradient_scale = scale});
      } else {
        adamw(device_, piece.value, state.first.data<float>() + piece.state, state.second.data<float>() + piece.state,
              piece.gradient, piece.size,
              {.lr = rate,
               .beta1 = static_cast<float>(options_.beta1),
               .beta2 = static_cast<float>(options_.beta2),
               .eps = static_cast<float>(options_.eps),
               .weight_decay = decay,
               .step = step,
               .gradient_scale = scale});
      }
      device_.make_progress();
    }
}

double ShardedOptimizer::gradient_squares() {
  const Timed timed(device_.recorder,
                    [&] { return interval("gradient norm", kSumOfSquaresBytes, states_, &ShardUnit::normed); });
  if (device_.meta()) return 0;
  std::vector<std::span<const float>> arrays;
  for (const State& state : states_)
    for (const ShardUnit::OwnedPiece& piece : state.unit->normed())
      arrays.emplace_back(piece.gradient, static_cast<std::size_t>(piece.size));
  squares_ = sums_of_squares(device_, arrays);
  return std::accumulate(squares_.begin(), squares_.end(), 0.0);
}

std::vector<double> ShardedOptimizer::nonzero_gradients() const {
  std::vector<double> out;
  auto square = squares_.begin();
  for (const State& state : states_) {
    std::vector<double> of_unit(state.unit->table().size(), 0.0);
    for (const ShardUnit::OwnedPiece& piece : state.unit->normed())
      // The square of the smallest number is not 0 in double, nor is that of NaN.
      if (!device_.meta() && *square++ != 0) of_unit[static_cast<std::size_t>(piece.param)] = 1.0;
    for (std::size_t i = 0; i < of_unit.size(); ++i)
      if (state.unit->table()[i].trainable) out.push_back(of_unit[i]);
  }
  return out;
}

double clip_scale(double norm, double max_norm) { return max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0; }

}  // namespace regather
