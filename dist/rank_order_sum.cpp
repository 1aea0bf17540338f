#include "dist/rank_order_sum.h"

#include <algorithm>
#include <array>
#include <cstddef>

namespace regather {

void sum_in_rank_order(std::span<const float* const> parts, std::int64_t n, float* out, Into into) {
  // In blocks that stay in the first-level cache, so that each part is read once and `out` is written once.
  constexpr std::int64_t kBlock = 1024;
  std::array<float, kBlock> sum;
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::size_t count = static_cast<std::size_t>(std::min(kBlock, n - begin));
    std::copy_n(parts[0] + begin, count, sum.data());
    for (const float* part : parts.subspan(1)) {
      const float* c = part + begin;
      for (std::size_t i = 0; i < count; ++i) sum[i] += c[i];
    }
    float* to = out + begin;
    if (into == Into::Add) {
      for (std::size_t i = 0; i < count; ++i) to[i] += sum[i];
    } else {
      std::copy_n(sum.data(), count, to);
    }
  }
}

}  // namespace regather
