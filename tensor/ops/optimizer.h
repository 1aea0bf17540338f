// Optimizer arithmetic on flat fp32 arrays, such as the shard of a rank. It knows no parameters, groups or schedules: a
// caller with several groups calls once a range. Results do not depend on where the arrays lie, nor on the number of
// threads. With a device: in its memory, by what it computes with; without: on the CPU.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "tensor/device.h"
#include "tensor/ops/kernel_types.h"

namespace regather {

// AdamW as in PyTorch: p *= 1 - lr weight_decay; m, v: running means of g and g^2; p -= lr m^ / (sqrt(v^) + eps), hats:
// bias-corrected.
struct AdamWStep {
  float lr = 0, beta1 = 0.9F, beta2 = 0.95F, eps = 1e-8F, weight_decay = 0;
  std::int64_t step = 1;     // from 1
  float gradient_scale = 1;  // multiplies g first: clipping, averaging
};
AdamWFactors factors_of(const AdamWStep& step);
void adamw(float* p, float* m, float* v, const float* g, std::int64_t n, const AdamWStep& step);
void adamw(Device& device, float* p, float* m, float* v, const float* g, std::int64_t n, const AdamWStep& step);

// SGD as in PyTorch: g += weight_decay p; buffer = momentum buffer + g; p -= lr buffer. momentum_buffer: zero at first;
// null if momentum is 0.
struct SgdStep {
  float lr = 0, momentum = 0, weight_decay = 0, gradient_scale = 1;
};
void sgd(float* p, float* momentum_buffer, const float* g, std::int64_t n, const SgdStep& step);
void sgd(Device& device, float* p, float* momentum_buffer, const float* g, std::int64_t n, const SgdStep& step);

// Bytes an element that have to move: arrays read or written once, for Work. sgd: without momentum.
inline constexpr double kAdamwBytes = 7 * 4, kSgdBytes = 3 * 4, kSumOfSquaresBytes = 4, kAccumulateBytes = 3 * 4,
                        kCountNonfiniteBytes = 4;

double sum_of_squares(const float* x, std::int64_t n);  // in double
// Of each array; waits, once for all of them.
std::vector<double> sums_of_squares(Device& device, std::span<const std::span<const float>> arrays);
void accumulate(float* to, const float* from, std::int64_t n);  // to += from
std::int64_t count_nonfinite(const float* x, std::int64_t n);   // infinities and NaNs
inline bool all_finite(const float* x, std::int64_t n) { return count_nonfinite(x, n) == 0; }

}  // namespace regather
