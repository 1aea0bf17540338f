// Philox4x32-10 (tensor/philox.h) for one counter a lane; the words come out in element order.
#pragma once
#include "tensor/ops/kernels/vec.h"

namespace regather::REGATHER_ISA {
namespace {

constexpr int kQuads = kLanes / 2;  // counters at a time: one in each 64-bit lane
typedef std::uint64_t U __attribute__((vector_size(8 * kQuads)));

REGATHER_INLINE U low_product(U a, U b) {  // of the low halves
#if defined(__AVX512F__)
  typedef int V __attribute__((vector_size(64)));
  typedef long long L __attribute__((vector_size(64)));
  return reinterpret_cast<U>(__builtin_ia32_pmuludq512_mask(reinterpret_cast<V>(a), reinterpret_cast<V>(b), L{},
                                                            static_cast<unsigned char>(-1)));
#elif defined(__AVX2__)
  typedef int V __attribute__((vector_size(32)));
  return reinterpret_cast<U>(__builtin_ia32_pmuludq256(reinterpret_cast<V>(a), reinterpret_cast<V>(b)));
#elif defined(__SSE2__)
  typedef int V __attribute__((vector_size(16)));
  return reinterpret_cast<U>(__builtin_ia32_pmuludq128(reinterpret_cast<V>(a), reinterpret_cast<V>(b)));
#else
  return (a & 0xFFFFFFFFU) * (b & 0xFFFFFFFFU);
#endif
}

// out[4 i + w] = word w of counter first + i, for i in [0, kQuads).
REGATHER_INLINE void random_words(std::uint32_t* out, const std::uint32_t (&key)[2], std::uint64_t sequence,
                                  std::uint64_t first) {
  constexpr std::uint64_t kLow = 0xFFFFFFFFU;
  U counter{};
  for (int i = 0; i < kQuads; ++i) counter[i] = first + static_cast<std::uint64_t>(i);
  U c0 = counter & kLow, c1 = counter >> 32;
  U c2 = U{} + (sequence & kLow), c3 = U{} + (sequence >> 32);
  std::uint32_t k0 = key[0], k1 = key[1];
  for (int round = 0; round < 10; ++round) {  // what is above the low halves does no harm: products do not read it
    const U a = low_product(c0, U{} + std::uint64_t{0xD2511F53U}),
            b = low_product(c2, U{} + std::uint64_t{0xCD9E8D57U});
    c0 = (b >> 32) ^ c1 ^ std::uint64_t{k0};
    c2 = (a >> 32) ^ c3 ^ std::uint64_t{k1};
    c1 = b;
    c3 = a;
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  const U low = (c0 & kLow) | (c1 << 32), high = (c2 & kLow) | (c3 << 32);
  for (int i = 0; i < kQuads; ++i) {
    const std::uint64_t pair[2] = {low[i], high[i]};
    __builtin_memcpy(out + 4 * i, pair, 16);
  }
}

// Words of elements [row.first, row.first + n). buffer: n + 4 kQuads + 4 words; returns where element row.first's is.
REGATHER_INLINE const std::uint32_t* random_row(std::uint32_t* buffer, const RandomRow& row, Size n) {
  const std::uint64_t quad = row.first / 4;
  const Size skip = static_cast<Size>(row.first % 4);
  for (Size i = 0; 4 * i < skip + n; i += kQuads)
    random_words(buffer + 4 * i, row.key, row.sequence, quad + static_cast<std::uint64_t>(i));
  return buffer + skip;
}

// factor where the word is at least threshold, 0 elsewhere.
REGATHER_INLINE F keep_factor(const std::uint32_t* words, std::uint32_t threshold, float factor) {
  typedef std::uint32_t W __attribute__((vector_size(4 * kLanes)));
  W w;
  __builtin_memcpy(&w, words, sizeof w);
  return w >= threshold ? splat(factor) : F{};
}

}  // namespace
}  // namespace regather::REGATHER_ISA
