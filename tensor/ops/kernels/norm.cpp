#include "tensor/ops/kernels/table.h"
#include "tensor/ops/kernels/vec.h"

namespace regather::REGATHER_ISA {
namespace {

// N sums over a row; f(i, get) gives the terms of one vector. Four sets of partial sums, so that additions overlap.
template <int N>
struct Terms {
  F t[N];
};
template <int N>
struct Sums {
  float s[N];
};
template <int N, class Fn>
REGATHER_INLINE Sums<N> row_sums(Size n, Fn f) {
  Terms<N> a{}, b{}, c{}, d{};
  const auto add = [](Terms<N> & to, const Terms<N>& x) __attribute__((always_inline)) {
    for (int k = 0; k < N; ++k) to.t[k] += x.t[k];
  };
  const auto full = [](const auto* p) __attribute__((always_inline)) { return load(p); };
  Size i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    add(a, f(i, full));
    add(b, f(i + kLanes, full));
    add(c, f(i + 2 * kLanes, full));
    add(d, f(i + 3 * kLanes, full));
  }
  for (; i + kLanes <= n; i += kLanes) add(a, f(i, full));
  Sums<N> all;
  for (int k = 0; k < N; ++k) all.s[k] = sum((a.t[k] + b.t[k]) + (c.t[k] + d.t[k]));
  if (i < n) {  // lanes past the end do not count: f of zeros need not be zero
    const Size rest = n - i;
    const Terms<N> last = f(
        i, [rest](const auto* p) __attribute__((always_inline)) { return load_first(p, rest); });
    for (int lane = 0; lane < kLanes; ++lane)
      for (int k = 0; k < N; ++k)
        if (lane < rest) all.s[k] += last.t[k][lane];
  }
  return all;
}

struct Moments {
  float mean, rstd;
};

template <class T>
REGATHER_INLINE Moments layer_moments(const T* x, Size n, float eps) {
  const float count = static_cast<float>(n);
  const float mean = row_sums<1>(n, [=](Size i, auto get) { return Terms<1>{{get(x + i)}}; }).s[0] / count;
  const float squares = row_sums<1>(n, [=](Size i, auto get) {
                          const F d = get(x + i) - mean;
                          return Terms<1>{{d * d}};
                        }).s[0];
  return {mean, 1.0F / __builtin_sqrtf(squares / count + eps)};
}
template <class T>
REGATHER_INLINE Moments rms_moments(const T* x, Size n, float eps) {
  const float squares = row_sums<1>(n, [=](Size i, auto get) {
                          const F a = get(x + i);
                          return Terms<1>{{a * a}};
                        }).s[0];
  return {0.0F, 1.0F / __builtin_sqrtf(squares / static_cast<float>(n) + eps)};
}

// With h = (x - mean) rstd:  dx = rstd (dy g - s0 - h s1), s0 = mean of dy g (0 without centring), s1 = mean of dy g h.
template <bool kCentred, bool kDx, bool kGain, bool kBias, class T>
REGATHER_INLINE void backward_row(T* dx, float* dgain, float* dbias, const T* x, const T* gain, const T* dy, Size n,
                                  Moments m) {
  float s0 = 0, s1 = 0;
  if constexpr (kDx) {
    const Sums<2> sums = row_sums<2>(n, [=](Size i, auto get) {
      const F e = get(dy + i) * get(gain + i);
      return Terms<2>{{e, e * ((get(x + i) - m.mean) * m.rstd)}};
    });
    s0 = kCentred ? sums.s[0] / static_cast<float>(n) : 0.0F;
    s1 = sums.s[1] / static_cast<float>(n);
  }
  for_each_vector(n, [=](Size i, auto get, auto put) {
    const F d = get(dy + i);
    if constexpr (kBias) put(dbias + i, get(dbias + i) + d);
    if constexpr (kDx || kGain) {
      const F h = (get(x + i) - m.mean) * m.rstd;
      if constexpr (kDx) put(dx + i, m.rstd * (d * get(gain + i) - s0 - h * s1));
      if constexpr (kGain) put(dgain + i, get(dgain + i) + d * h);
    }
  });
}

struct Yes {
  static constexpr bool value = true;
};
struct No {
  static constexpr bool value = false;
};
// f with what is known only now as a compile-time constant.
template <class Fn>
REGATHER_INLINE void with_constant(bool known, Fn f) {
  known ? f(Yes{}) : f(No{});
}

template <bool kCentred, class T>
REGATHER_INLINE void backward_rows(T* dx, float* dgain, float* dbias, const T* x, const T* gain, const T* dy, Size rows,
                                   Size cols, float eps) {
  with_constant(dx != nullptr, [=](auto a) {
    with_constant(dgain != nullptr, [=](auto b) {
      with_constant(dbias != nullptr, [=](auto c) {
        constexpr bool kDx = decltype(a)::value, kGain = decltype(b)::value, kBias = decltype(c)::value;
        for (Size r = 0; r < rows; ++r) {
          const Size at = r * cols;
          Moments m{};
          if constexpr (kDx || kGain) m = kCentred ? layer_moments(x + at, cols, eps) : rms_moments(x + at, cols, eps);
          backward_row<kCentred, kDx, kGain, kBias>(kDx ? dx + at : nullptr, dgain, dbias,
                                                    kDx || kGain ? x + at : nullptr, gain, dy + at, cols, m);
        }
      });
    });
  });
}

}  // namespace

template <class T>
void layer_norm(T* y, const T* x, const T* gain, const T* bias, Size rows, Size cols, float eps) {
  for (Size r = 0; r < rows; ++r, x += cols, y += cols) {
    const Moments m = layer_moments(x, cols, eps);
    for_each_vector(cols, [=](Size i, auto get, auto put) {
      put(y + i, (get(x + i) - m.mean) * m.rstd * get(gain + i) + get(bias + i));
    });
  }
}

template <class T>
void rms_norm(T* y, const T* x, const T* gain, Size rows, Size cols, float eps) {
  for (Size r = 0; r < rows; ++r, x += cols, y += cols) {
    const Moments m = rms_moments(x, cols, eps);
    for_each_vector(cols, [=](Size i, auto get, auto put) { put(y + i, get(x + i) * m.rstd * get(gain + i)); });
  }
}

template <class T>
void layer_norm_backward(T* dx, float* dgain, float* dbias, const T* x, const T* gain, const T* dy, Size rows,
                         Size cols, float eps) {
  backward_rows<true>(dx, dgain, dbias, x, gain, dy, rows, cols, eps);
}

template <class T>
void rms_norm_backward(T* dx, float* dgain, const T* x, const T* gain, const T* dy, Size rows, Size cols, float eps) {
  backward_rows<false>(dx, dgain, nullptr, x, gain, dy, rows, cols, eps);
}

template void layer_norm(float*, const float*, const float*, const float*, Size, Size, float);
template void rms_norm(float*, const float*, const float*, Size, Size, float);
template void layer_norm_backward(float*, float*, float*, const float*, const float*, const float*, Size, Size, float);
template void rms_norm_backward(float*, float*, const float*, const float*, const float*, Size, Size, float);

template void layer_norm(Bf16*, const Bf16*, const Bf16*, const Bf16*, Size, Size, float);
template void rms_norm(Bf16*, const Bf16*, const Bf16*, Size, Size, float);
template void layer_norm_backward(Bf16*, float*, float*, const Bf16*, const Bf16*, const Bf16*, Size, Size, float);
template void rms_norm_backward(Bf16*, float*, const Bf16*, const Bf16*, const Bf16*, Size, Size, float);

}  // namespace regather::REGATHER_ISA
