#include "tensor/ops/optimizer.h"

#include <cmath>

#include "tensor/error.h"
#include "tensor/ops/kernels.h"
#include "tensor/ops/on_gpu.h"
#include "tensor/ops/parallel.h"

namespace regather {
namespace {

// Arrays are cut into pieces of this many elements; sums over pieces are added in order.
constexpr std::int64_t kPiece = std::int64_t{1} << 18, kSumsAtATime = 64;

template <class T, class F>
T sum_of_pieces(std::int64_t n, F f) {
  T total = 0;
  for (std::int64_t first = 0; first < n; first += kSumsAtATime * kPiece) {
    T sums[kSumsAtATime] = {};
    const std::int64_t count = std::min(n - first, kSumsAtATime * kPiece);
    parallel_blocks(count, kPiece, [&](std::int64_t begin, std::int64_t end) {
      sums[begin / kPiece] = f(first + begin, end - begin);
    });
    for (const T& sum : sums) total += sum;
  }
  return total;
}

}  // namespace

AdamWFactors factors_of(const AdamWStep& s) {
  check(s.step >= 1, "adamw: steps count from 1, got {}", s.step);
  const double t = static_cast<double>(s.step), beta1 = s.beta1, beta2 = s.beta2;
  return {
      .gradient_scale = s.gradient_scale,
      .beta1 = s.beta1,
      .one_minus_beta1 = static_cast<float>(1.0 - beta1),
      .beta2 = s.beta2,
      .one_minus_beta2 = static_cast<float>(1.0 - beta2),
      .decay = static_cast<float>(1.0 - static_cast<double>(s.lr) * static_cast<double>(s.weight_decay)),
      .step_size = static_cast<float>(static_cast<double>(s.lr) / (1.0 - std::pow(beta1, t))),
      .inverse_root_correction2 = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, t))),
      .eps = s.eps,
  };
}

void adamw(float* p, float* m, float* v, const float* g, std::int64_t n, const AdamWStep& s) {
  const AdamWFactors f = factors_of(s);
  parallel_blocks(n, kPiece, [&](auto begin, auto end) {
    kernels().adamw(p + begin, m + begin, v + begin, g + begin, end - begin, f);
  });
}

void adamw(Device& device, float* p, float* m, float* v, const float* g, std::int64_t n, const AdamWStep& s) {
  if (on_gpu(device, [&](GpuOps& gpu) { gpu.adamw(p, m, v, g, n, factors_of(s)); })) return;
  adamw(p, m, v, g, n, s);
}

void sgd(float* p, float* momentum_buffer, const float* g, std::int64_t n, const SgdStep& s) {
  check(momentum_buffer != nullptr || s.momentum == 0.0F, "sgd: momentum {} needs a buffer", s.momentum);
  parallel_blocks(n, kPiece, [&](auto begin, auto end) {
    kernels().sgd(p + begin, momentum_buffer ? momentum_buffer + begin : nullptr, g + begin, end - begin,
                  s.gradient_scale, s.weight_decay, s.lr, s.momentum);
  });
}

void sgd(Device& device, float* p, float* momentum_buffer, const float* g, std::int64_t n, const SgdStep& s) {
  const auto by_gpu = [&](GpuOps& gpu) {
    gpu.sgd(p, momentum_buffer, g, n, s.gradient_scale, s.weight_decay, s.lr, s.momentum);
  };
  if (on_gpu(device, by_gpu)) return;
  sgd(p, momentum_buffer, g, n, s);
}

std::vector<double> sums_of_squares(Device& device, std::span<const std::span<const float>> arrays) {
  std::vector<double> sums;
  const auto by_gpu = [&](GpuOps& gpu) { sums = gpu.sums_of_squares(arrays, [&] { device.make_progress(); }); };
  if (on_gpu(device, by_gpu)) return sums;
  for (const auto& x : arrays) sums.push_back(sum_of_squares(x.data(), std::ssize(x)));
  return sums;
}

double sum_of_squares(const float* x, std::int64_t n) {
  return sum_of_pieces<double>(n, [&](auto first, auto count) { return kernels().sum_of_squares(x + first, count); });
}

void accumulate(float* to, const float* from, std::int64_t n) {
  parallel_blocks(n, kElementGrain, [&](auto begin, auto end) {
    kernels_on<float>().add(to + begin, to + begin, from + begin, end - begin);
  });
}

std::int64_t count_nonfinite(const float* x, std::int64_t n) {
  return sum_of_pieces<std::int64_t>(
      n, [&](auto first, auto count) { return kernels().count_nonfinite(x + first, count); });
}

}  // namespace regather
