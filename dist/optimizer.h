// The optimizer of this rank's shards: state exists for the elements that the rank updates and for no others. Weight
// decay follows the parameters' own flags, wherever a shard cuts them. The norm of the whole gradient is the sum over
// ranks of gradient_squares(), each element counted once; combining it over ranks is the caller's.
#pragma once
#include <memory>
#include <span>
#include <vector>

#include "dist/shard_unit.h"

namespace regather {

struct OptimizerOptions {
  enum class Type { AdamW, Sgd } type = Type::AdamW;  // AdamW: Loshchilov and Hutter, ICLR 2019
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
};

class ShardedOptimizer {
 public:
  ShardedOptimizer(std::span<const std::unique_ptr<ShardUnit>> units, Device& device, const OptimizerOptions& options);

  // step: of the optimizer, from 1 (bias correction). Gradients are multiplied by gradient_scale (clipping).
  void step(double lr, double gradient_scale, std::int64_t step);
  // Sum of squares over the trainable elements that this rank holds, in double.
  double gradient_squares();
  // For each trainable parameter, in the order of the units: 1 if this rank holds an element of its gradient that was
  // not zero when gradient_squares() was last asked.
  std::vector<double> nonzero_gradients() const;

 private:
  struct State {
    ShardUnit* unit;
    Buffer first, second;  // moments
  };
  Device& device_;
  OptimizerOptions options_;
  std::vector<State> states_;
  std::vector<double> squares_;  // of each piece that is normed, in their order
};

// What PyTorch's clip_grad_norm_ multiplies by: max_norm / (norm + 1e-6), at most 1; max_norm 0: not clipped.
double clip_scale(double norm, double max_norm);

}  // namespace regather
