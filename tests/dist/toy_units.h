// Units of odd sizes for tests on simulated ranks, and what can be said about them without asking them.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "dist/shard_unit.h"
#include "tensor/trace.h"

namespace regather::toy {

using Floats = std::vector<float>;

inline constexpr Strategy kStrategies[] = {Strategy::Full, Strategy::Gradients, Strategy::Optimizer, Strategy::None};
inline std::string name_of(Strategy s) {
  return s == Strategy::Full        ? "full"
         : s == Strategy::Gradients ? "gradients"
         : s == Strategy::Optimizer ? "optimizer"
                                    : "none";
}

// 28 trainable elements in four parameters, and two frozen ones of 9 between them. No number of ranks from 3 divides
// both.
inline UnitSpec odd_unit(const std::string& name = "block 3") {
  const std::string p = name + ".";
  return {name,
          {{.name = p + "weight", .shape = {5, 3}, .init = normal(0.5F)},
           {.name = p + "frozen.weight", .shape = {2, 4}, .init = normal(0.5F), .trainable = false},
           {.name = p + "bias", .shape = {5}, .init = normal(0.1F), .decay = false},
           {.name = p + "gain", .shape = {7}, .init = ones(), .decay = false},
           {.name = p + "frozen.gain", .shape = {1}, .init = ones(), .decay = false, .trainable = false},
           {.name = p + "scale", .shape = {1}, .init = normal(0.5F)}}};
}
inline constexpr std::int64_t kTrainable = 28, kFrozen = 9;

inline UnitSpec tiny_unit() {
  return {"tiny", {{.name = "tiny.weight", .shape = {2}, .init = normal(0.5F)}}};
}  // empty shards
inline UnitSpec frozen_unit() {
  return {"frozen", {{.name = "frozen.weight", .shape = {3, 5}, .init = normal(0.5F), .trainable = false}}};
}

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

inline Floats start_values(const ParamInfo& info, std::uint64_t seed) {
  Floats v(static_cast<std::size_t>(info.shape.numel()));
  initialize(info, seed, 0, info.shape.numel(), v.data());
  return v;
}
inline Floats read(ShardUnit& unit, int i) {
  const auto* data = static_cast<const float*>(unit.data(i));
  return {data, data + unit.table()[static_cast<std::size_t>(i)].shape.numel()};
}

// Element i of what rank r contributes to parameter p the k-th time: of so many magnitudes that the order of a sum
// shows.
inline float contribution(int rank, int p, std::int64_t i, int k = 0) {
  const PhiloxBlock w = RngKey{.seed = 11,
                               .step = static_cast<std::uint64_t>(k),
                               .block = static_cast<std::uint64_t>(rank),
                               .op = static_cast<std::uint64_t>(p)}
                            .quad(0, static_cast<std::uint64_t>(i));
  return std::ldexp(static_cast<float>(w[0] >> 8) * 0x1p-24F - 0.5F, static_cast<int>(w[1] % 20) - 10);
}
inline void contribute(ShardUnit& unit, int rank, Tag lifetime, int k = 0) {
  UnitGradients& gradients = unit.gradients(lifetime);
  for (int p = 0; p < static_cast<int>(unit.table().size()); ++p)
    if (float* g = gradients.data(p))
      for (std::int64_t i = 0; i < unit.table()[static_cast<std::size_t>(p)].shape.numel(); ++i)
        g[i] += contribution(rank, p, i, k);
}

// The parts that ranks hold, put together; what two ranks give must not overlap.
class Whole {
 public:
  void add(const ShardUnit& unit, const std::vector<ShardUnit::OwnedPiece>& pieces,
           float* ShardUnit::OwnedPiece::*what) {
    const std::lock_guard lock(mutex_);
    for (const ShardUnit::OwnedPiece& piece : pieces) {
      const ParamInfo& info = unit.table()[static_cast<std::size_t>(piece.param)];
      Floats& whole = values_[info.name];
      whole.resize(static_cast<std::size_t>(info.shape.numel()), NAN);
      for (std::int64_t i = 0; i < piece.size; ++i) {
        float& to = whole.at(static_cast<std::size_t>(piece.first + i));
        EXPECT_TRUE(std::isnan(to)) << info.name << " element " << piece.first + i << " is held twice";
        to = (piece.*what)[i];
      }
    }
  }
  const std::map<std::string, Floats>& values() const { return values_; }

 private:
  std::mutex mutex_;
  std::map<std::string, Floats> values_;
};

inline void on_ranks(int world, const std::function<void(Communicator&)>& body, std::chrono::microseconds delay = {}) {
  SimOptions options;
  options.checked = true;
  options.delay = delay;
  options.timeout = std::chrono::seconds(20);
  run_ranks(world, options, body);
}

}  // namespace regather::toy
