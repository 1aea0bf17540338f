// Vectors of the instruction set that this file is compiled for, by GCC's vector extensions. Everything here is
// internal to one source file of one instruction set: no inline function may leave it (see kernel_types.h), so no
// standard header with inline functions is included either.
#pragma once
#include <cstdint>

#include "tensor/ops/kernel_types.h"

#ifndef REGATHER_ISA
#error "compile with -DREGATHER_ISA=<namespace>"
#endif

#define REGATHER_INLINE __attribute__((always_inline)) inline

namespace regather::REGATHER_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using Size = std::int64_t;
typedef float F __attribute__((vector_size(4 * kLanes)));
typedef double D __attribute__((vector_size(8 * kLanes)));
typedef std::int32_t I __attribute__((vector_size(4 * kLanes)));
typedef std::uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef std::uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef float UnalignedF __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef std::uint16_t UnalignedHalves __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

REGATHER_INLINE F load(const float* p) { return *reinterpret_cast<const UnalignedF*>(p); }
REGATHER_INLINE void store(float* p, F v) { *reinterpret_cast<UnalignedF*>(p) = v; }
REGATHER_INLINE F splat(float x) { return x - F{}; }

// The same of bf16 elements: widened when loaded, rounded to nearest (ties to even) when stored; NaN stays NaN.
REGATHER_INLINE Halves rounded(F v) {
  const Bits bits = reinterpret_cast<Bits>(v), even = bits + 0x7FFFU + ((bits >> 16) & 1U);
  return __builtin_convertvector((v == v ? even : bits | 0x400000U) >> 16, Halves);
}
REGATHER_INLINE F load(const Bf16* p) {
  return reinterpret_cast<F>(__builtin_convertvector(*reinterpret_cast<const UnalignedHalves*>(p), Bits) << 16);
}
REGATHER_INLINE void store(Bf16* p, F v) { *reinterpret_cast<UnalignedHalves*>(p) = rounded(v); }

// The first n elements, zeros after them; so a row's tail goes through the same arithmetic as its body.
REGATHER_INLINE F load_first(const float* p, Size n) {
  F v{};
  for (int i = 0; i < kLanes; ++i)
    if (i < n) v[i] = p[i];
  return v;
}
REGATHER_INLINE void store_first(float* p, F v, Size n) {
  for (int i = 0; i < kLanes; ++i)
    if (i < n) p[i] = v[i];
}
REGATHER_INLINE F load_first(const Bf16* p, Size n) {
  Bits v{};
  for (int i = 0; i < kLanes; ++i)
    if (i < n) v[i] = static_cast<std::uint32_t>(p[i]) << 16;
  return reinterpret_cast<F>(v);
}
REGATHER_INLINE void store_first(Bf16* p, F v, Size n) {
  const Halves halves = rounded(v);
  for (int i = 0; i < kLanes; ++i)
    if (i < n) p[i] = static_cast<Bf16>(halves[i]);
}

// f(i, get, put): one vector of elements from i on; get loads and put stores a vector, or what is left of a row.
template <class Fn>
REGATHER_INLINE void for_each_vector(Size n, Fn f) {
  Size i = 0;
  for (; i + kLanes <= n; i += kLanes)
    f(
        i, [](const auto* p) __attribute__((always_inline)) { return load(p); },
        [](auto* p, F v) __attribute__((always_inline)) { store(p, v); });
  if (i < n) {
    const Size rest = n - i;
    f(
        i, [rest](const auto* p) __attribute__((always_inline)) { return load_first(p, rest); },
        [rest](auto* p, F v) __attribute__((always_inline)) { store_first(p, v, rest); });
  }
}

// max and min: b if one of them is NaN. The compiler does not always see these instructions in a comparison.
#if defined(__AVX512F__)
REGATHER_INLINE F max(F a, F b) { return __builtin_ia32_maxps512_mask(a, b, F{}, -1, 4); }
REGATHER_INLINE F min(F a, F b) { return __builtin_ia32_minps512_mask(a, b, F{}, -1, 4); }
REGATHER_INLINE F square_root(F x) { return __builtin_ia32_sqrtps512_mask(x, F{}, -1, 4); }  // 4: round as usual
#elif defined(__AVX2__)
REGATHER_INLINE F max(F a, F b) { return __builtin_ia32_maxps256(a, b); }
REGATHER_INLINE F min(F a, F b) { return __builtin_ia32_minps256(a, b); }
REGATHER_INLINE F square_root(F x) { return __builtin_ia32_sqrtps256(x); }
#elif defined(__SSE2__)
REGATHER_INLINE F max(F a, F b) { return __builtin_ia32_maxps(a, b); }
REGATHER_INLINE F min(F a, F b) { return __builtin_ia32_minps(a, b); }
REGATHER_INLINE F square_root(F x) { return __builtin_ia32_sqrtps(x); }
#else
REGATHER_INLINE F max(F a, F b) { return a > b ? a : b; }
REGATHER_INLINE F min(F a, F b) { return a < b ? a : b; }
REGATHER_INLINE F square_root(F x) {
  F y{};
  for (int i = 0; i < kLanes; ++i) y[i] = __builtin_sqrtf(x[i]);
  return y;
}
#endif

template <int W>
REGATHER_INLINE F exchange(F v) {
  I index{};
  for (int i = 0; i < kLanes; ++i) index[i] = i ^ W;
  return __builtin_shuffle(v, index);
}
REGATHER_INLINE float sum(F v) {
  if constexpr (kLanes > 8) v += exchange<8>(v);
  if constexpr (kLanes > 4) v += exchange<4>(v);
  v += exchange<2>(v);
  v += exchange<1>(v);
  return v[0];
}
REGATHER_INLINE float largest(F v) {
  if constexpr (kLanes > 8) v = max(v, exchange<8>(v));
  if constexpr (kLanes > 4) v = max(v, exchange<4>(v));
  v = max(v, exchange<2>(v));
  v = max(v, exchange<1>(v));
  return v[0];
}

// Round to nearest by adding 1.5 * 2^23: the integer is then in the low bits.
constexpr float kRound = 12582912.0F;

REGATHER_INLINE F power_of_two(F rounded_plus_magic) {
  return reinterpret_cast<F>((reinterpret_cast<I>(rounded_plus_magic) + 127) << 23);
}

// 2^x for x <= 1, relative error below 2e-7; exactly 0 below 2^-126 (so -inf masks), NaN stays NaN.
REGATHER_INLINE F exp2_below_one(F x) {
  const F z = x + kRound;
  const F f = x - (z - kRound);
  F p = splat(1.535336188319500e-4F);
  p = p * f + 1.339887440266574e-3F;
  p = p * f + 9.618437357674640e-3F;
  p = p * f + 5.550332471162809e-2F;
  p = p * f + 2.402264791363012e-1F;
  p = p * f + 6.931472028550421e-1F;
  p = p * f + 1.0F;
  return x < -126.0F ? F{} : p * power_of_two(z);
}

// e^x, relative error below 2e-7 up to 88.3, infinite above; not less than e^-87.3; NaN stays NaN.
REGATHER_INLINE F exp(F x) {
  const F clamped = min(splat(89.0F), max(splat(-87.3F), x));
  const F z = clamped * 1.44269504088896341F + kRound;
  const F n = z - kRound;
  const F r = (clamped - n * 0.693359375F) + n * 2.12194440e-4F;
  F p = splat(1.9875691500e-4F);
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * (r * r) + r + 1.0F;
  return p * power_of_two(z);
}
REGATHER_INLINE F sigmoid(F x) { return 1.0F / (1.0F + exp(-x)); }

}  // namespace
}  // namespace regather::REGATHER_ISA
