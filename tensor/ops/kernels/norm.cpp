#include "tensor/ops/kernels/table.h"
#include "tensor/ops/kernels/vec.h"

namespace regather::REGATHER_ISA {
namespace {

// Sum over a row of f(i, get); four independent sums, so that additions overlap.
template <class Fn>
REGATHER_INLINE float row_sum(Size n, Fn f) {
  F s0{}, s1{}, s2{}, s3{};
  Size i = 0;
  const auto full = [](const float* p) __attribute__((always_inline)) { return load(p); };
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    s0 += f(i, full);
    s1 += f(i + kLanes, full);
    s2 += f(i + 2 * kLanes, full);
    s3 += f(i + 3 * kLanes, full);
  }
  for (; i + kLanes <= n; i += kLanes) s0 += f(i, full);
  float tail = 0;
  if (i < n) {
    const Size rest = n - i;
    const F last = f(
        i, [rest](const float* p) __attribute__((always_inline)) { return load_first(p, rest); });
    for (int k = 0; k < kLanes; ++k)
      if (k < rest) tail += last[k];
  }
  return sum((s0 + s1) + (s2 + s3)) + tail;
}

struct Moments {
  float mean, rstd;
};

REGATHER_INLINE Moments layer_moments(const float* x, Size n, float eps) {
  const float mean = row_sum(n, [=](Size i, auto get) { return get(x + i); }) / static_cast<float>(n);
  const float variance = row_sum(n,
                                 [=](Size i, auto get) {
                                   const F d = get(x + i) - mean;
                                   return d * d;
                                 }) /
                         static_cast<float>(n);
  return {mean, 1.0F / __builtin_sqrtf(variance + eps)};
}
REGATHER_INLINE Moments rms_moments(const float* x, Size n, float eps) {
  const float square = row_sum(n,
                               [=](Size i, auto get) {
                                 const F a = get(x + i);
                                 return a * a;
                               }) /
                       static_cast<float>(n);
  return {0.0F, 1.0F / __builtin_sqrtf(square + eps)};
}

// With h = (x - mean) rstd:  dx = rstd (dy g - s0 - h s1), s0 = mean of dy g (0 without centring), s1 = mean of dy g h.
template <bool kCentred>
REGATHER_INLINE void backward_row(float* dx, float* dgain, float* dbias, const float* x, const float* gain,
                                  const float* dy, Size n, Moments m) {
  if (dx) {
    const float count = static_cast<float>(n);
    const float s1 =
        row_sum(n, [=](Size i, auto get) { return get(dy + i) * get(gain + i) * ((get(x + i) - m.mean) * m.rstd); }) /
        count;
    const float s0 =
        kCentred ? row_sum(n, [=](Size i, auto get) { return get(dy + i) * get(gain + i); }) / count : 0.0F;
    for_each_vector(n, [=](Size i, auto get, auto put) {
      const F h = (get(x + i) - m.mean) * m.rstd;
      put(dx + i, m.rstd * (get(dy + i) * get(gain + i) - s0 - h * s1));
    });
  }
  if (dgain)
    for_each_vector(n, [=](Size i, auto get, auto put) {
      put(dgain + i, get(dgain + i) + get(dy + i) * ((get(x + i) - m.mean) * m.rstd));
    });
  if (dbias) for_each_vector(n, [=](Size i, auto get, auto put) { put(dbias + i, get(dbias + i) + get(dy + i)); });
}

}  // namespace

void layer_norm(float* y, const float* x, const float* gain, const float* bias, Size rows, Size cols, float eps) {
  for (Size r = 0; r < rows; ++r, x += cols, y += cols) {
    const Moments m = layer_moments(x, cols, eps);
    for_each_vector(cols, [=](Size i, auto get, auto put) {
      put(y + i, (get(x + i) - m.mean) * m.rstd * get(gain + i) + get(bias + i));
    });
  }
}

void rms_norm(float* y, const float* x, const float* gain, Size rows, Size cols, float eps) {
  for (Size r = 0; r < rows; ++r, x += cols, y += cols) {
    const Moments m = rms_moments(x, cols, eps);
    for_each_vector(cols, [=](Size i, auto get, auto put) { put(y + i, get(x + i) * m.rstd * get(gain + i)); });
  }
}

void layer_norm_backward(float* dx, float* dgain, float* dbias, const float* x, const float* gain, const float* dy,
                         Size rows, Size cols, float eps) {
  for (Size r = 0; r < rows; ++r, dy += cols) {
    const Moments m = dx || dgain ? layer_moments(x, cols, eps) : Moments{};
    backward_row<true>(dx, dgain, dbias, x, gain, dy, cols, m);
    if (x) x += cols;
    if (dx) dx += cols;
  }
}

void rms_norm_backward(float* dx, float* dgain, const float* x, const float* gain, const float* dy, Size rows,
                       Size cols, float eps) {
  for (Size r = 0; r < rows; ++r, x += cols, dy += cols) {
    backward_row<false>(dx, dgain, nullptr, x, gain, dy, cols, rms_moments(x, cols, eps));
    if (dx) dx += cols;
  }
}

}  // namespace regather::REGATHER_ISA
