// The learning rate of a step: a linear warm-up, then half a cosine down to the lowest rate at the last step, or
// constant.
#pragma once
#include <cstdint>

namespace regather {

struct LearningRate {
  enum class Shape { Cosine, Constant } shape = Shape::Cosine;
  double peak = 3e-4, min = 0;
  std::int64_t warmup_steps = 0, steps = 1;  // warm-up may be longer than the run

  // step: from 1. In the warm-up peak * step / warmup_steps; at step `steps` the cosine ends at min.
  double at(std::int64_t step) const;
};

}  // namespace regather
