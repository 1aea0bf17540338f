#include "launcher/schedule.h"

#include <cmath>
#include <numbers>

namespace regather {

double LearningRate::at(std::int64_t step) const {
  if (step <= warmup_steps) return peak * static_cast<double>(step) / static_cast<double>(warmup_steps);
  if (shape == Shape::Constant) return peak;
  if (step >= steps) return min;
  const double progress = static_cast<double>(step - warmup_steps) / static_cast<double>(steps - warmup_steps);
  return min + (peak - min) * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
}

}  // namespace regather
