#include "tensor/ops/kernels/table.h"
#include "tensor/ops/kernels/vec.h"

namespace regather::REGATHER_ISA {
namespace {

REGATHER_INLINE float row_max(const float* x, Size n) {
  F m0 = splat(-__builtin_inff()), m1 = m0;
  Size i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    m0 = max(load(x + i), m0);
    m1 = max(load(x + i + kLanes), m1);
  }
  float m = largest(max(m0, m1));
  for (; i < n; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

// Sum of e^(x - top); with kStore the terms replace x. Sums of at most 4096 terms a lane are added up in double.
template <bool kStore>
REGATHER_INLINE float sum_of_exponentials(float* to, const float* x, Size n, float top) {
  constexpr Size kPiece = 4096;
  double total = 0;
  Size i = 0;
  while (i + kLanes <= n) {
    const Size end = n - i < kPiece ? n : i + kPiece;
    F s{};
    for (; i + kLanes <= end; i += kLanes) {
      const F e = exp(load(x + i) - top);
      if constexpr (kStore) store(to + i, e);
      s += e;
    }
    total += static_cast<double>(sum(s));
  }
  if (i < n) {
    const F e = exp(load_first(x + i, n - i) - top);
    if constexpr (kStore) store_first(to + i, e, n - i);
    for (int k = 0; k < kLanes; ++k)
      if (k < n - i) total += static_cast<double>(e[k]);
  }
  return static_cast<float>(total);
}

}  // namespace

float token_loss(const float* logits, Size vocab, Size target) {
  const float top = row_max(logits, vocab);
  return __builtin_logf(sum_of_exponentials<false>(nullptr, logits, vocab, top)) + (top - logits[target]);
}

float token_loss_gradient(float* logits, Size vocab, Size target, float weight) {
  const float top = row_max(logits, vocab), chosen = logits[target];
  const float total = sum_of_exponentials<true>(logits, logits, vocab, top);
  const float scale = weight / total;
  Size i = 0;
  for (; i + kLanes <= vocab; i += kLanes) store(logits + i, load(logits + i) * scale);
  for (; i < vocab; ++i) logits[i] *= scale;
  logits[target] -= weight;
  return __builtin_logf(total) + (top - chosen);
}

}  // namespace regather::REGATHER_ISA
