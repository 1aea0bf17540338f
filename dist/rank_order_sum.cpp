#include "dist/rank_order_sum.h"

#include <algorithm>
#include <array>
#include <cstddef>

namespace regather {
namespace {

// Of `parts` from `begin` on. Two parts a pass; what is between passes stays in the first-level cache.
// ivdep: `out` may be a part itself, but an element only ever meets the elements of its own index.
constexpr std::size_t kBlock = 1024;
template <SumInto into>
void sum_block(std::span<const float* const> parts, std::int64_t begin, std::size_t n, float* out) {
  const auto put = [](float& to, float value) { to = into == SumInto::Add ? to + value : value; };
  std::array<float, kBlock> between;
  const float* sum = parts[0] + begin;
  std::size_t next = 1;
  for (; next + 2 < parts.size(); next += 2) {
    const float *a = parts[next] + begin, *b = parts[next + 1] + begin;
#pragma GCC ivdep
    for (std::size_t i = 0; i < n; ++i) between[i] = (sum[i] + a[i]) + b[i];
    sum = between.data();
  }
  const std::span<const float* const> last = parts.subspan(next);
  if (last.empty()) {
#pragma GCC ivdep
    for (std::size_t i = 0; i < n; ++i) put(out[i], sum[i]);
  } else if (last.size() == 1) {
    const float* a = last[0] + begin;
#pragma GCC ivdep
    for (std::size_t i = 0; i < n; ++i) put(out[i], sum[i] + a[i]);
  } else {
    const float *a = last[0] + begin, *b = last[1] + begin;
#pragma GCC ivdep
    for (std::size_t i = 0; i < n; ++i) put(out[i], (sum[i] + a[i]) + b[i]);
  }
}

}  // namespace

void sum_in_rank_order(std::span<const float* const> parts, std::int64_t n, float* out, SumInto into) {
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::size_t count = std::min(kBlock, static_cast<std::size_t>(n - begin));
    if (into == SumInto::Add) {
      sum_block<SumInto::Add>(parts, begin, count, out + begin);
    } else {
      sum_block<SumInto::Replace>(parts, begin, count, out + begin);
    }
  }
}

}  // namespace regather
