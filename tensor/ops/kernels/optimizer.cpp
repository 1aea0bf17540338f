#include "tensor/ops/kernels/table.h"
#include "tensor/ops/kernels/vec.h"

namespace regather::REGATHER_ISA {
namespace {

typedef float Half __attribute__((vector_size(2 * kLanes), aligned(4), may_alias));  // half a vector: kLanes / 2 floats
typedef double Wide __attribute__((vector_size(4 * kLanes)));                        // the same many doubles

struct Moved {
  F p, m, v;
};
// With a zero gradient and zero moments p becomes p * decay exactly.
REGATHER_INLINE Moved adamw_vector(F p, F m, F v, F gradient, const AdamWFactors& f) {
  const F g = gradient * f.gradient_scale;
  m = m * f.beta1 + g * f.one_minus_beta1;
  v = v * f.beta2 + g * g * f.one_minus_beta2;
  const F denominator = square_root(v) * f.inverse_root_correction2 + f.eps;
  return {p * f.decay - f.step_size * (m / denominator), m, v};
}

}  // namespace

void adamw(float* p, float* m, float* v, const float* g, Size n, const AdamWFactors& f) {
  Size i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Moved t = adamw_vector(load(p + i), load(m + i), load(v + i), load(g + i), f);
    store(p + i, t.p);
    store(m + i, t.m);
    store(v + i, t.v);
  }
  if (i < n) {
    const Size rest = n - i;
    const Moved t = adamw_vector(load_first(p + i, rest), load_first(m + i, rest), load_first(v + i, rest),
                                 load_first(g + i, rest), f);
    store_first(p + i, t.p, rest);
    store_first(m + i, t.m, rest);
    store_first(v + i, t.v, rest);
  }
}

void sgd(float* p, float* momentum, const float* g, Size n, float gradient_scale, float decay, float lr, float mu) {
  for (Size i = 0; i < n; i += kLanes) {
    const Size rest = n - i;
    const bool full = rest >= kLanes;
    const F x = full ? load(p + i) : load_first(p + i, rest);
    F d = (full ? load(g + i) : load_first(g + i, rest)) * gradient_scale + x * decay;
    if (momentum) {
      d = (full ? load(momentum + i) : load_first(momentum + i, rest)) * mu + d;
      full ? store(momentum + i, d) : store_first(momentum + i, d, rest);
    }
    full ? store(p + i, x - lr * d) : store_first(p + i, x - lr * d, rest);
  }
}

double sum_of_squares(const float* x, Size n) {
  constexpr int kHalf = kLanes / 2;
  Wide s[4] = {};
  Size i = 0;
  for (; i + 4 * kHalf <= n; i += 4 * kHalf)
    for (int k = 0; k < 4; ++k) {
      const Wide a = __builtin_convertvector(*reinterpret_cast<const Half*>(x + i + k * kHalf), Wide);
      s[k] += a * a;
    }
  const Wide all = (s[0] + s[1]) + (s[2] + s[3]);
  double total = 0;
  for (int k = 0; k < kHalf; ++k) total += all[k];
  for (; i < n; ++i) total += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return total;
}

Size count_nonfinite(const float* x, Size n) {
  constexpr std::uint32_t kExponent = 0x7F800000U;
  Size count = 0, i = 0;
  while (i + kLanes <= n) {  // a lane counts at most 2^16 before it is added up
    const Size end = n - i < (kLanes << 16) ? n : i + (kLanes << 16);
    I found{};
    for (; i + kLanes <= end; i += kLanes) found -= (reinterpret_cast<Bits>(load(x + i)) & kExponent) == kExponent;
    for (int k = 0; k < kLanes; ++k) count += found[k];
  }
  for (; i < n; ++i) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, x + i, 4);
    count += (bits & kExponent) == kExponent;
  }
  return count;
}

}  // namespace regather::REGATHER_ISA
