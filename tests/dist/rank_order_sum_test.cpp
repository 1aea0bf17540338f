// The one sum of the host backends, against a plain loop for each element.
#include "dist/rank_order_sum.h"

#include <gtest/gtest.h>

#include "tests/dist/contributions.h"

namespace regather::conformance {
namespace {

TEST(RankOrderSum, AddsPartsInTheirOrderForAnyNumberOfThem) {
  for (const int ranks : {1, 2, 3, 4, 5, 8, 9})
    for (const std::int64_t n : {0, 1, 7, 1024, 1025, 5000}) {
      std::vector<std::vector<float>> contributions;
      std::vector<const float*> parts;
      for (int r = 0; r < ranks; ++r) contributions.push_back(numbers(r, n));
      for (const auto& c : contributions) parts.push_back(c.data());
      std::vector<float> replaced(static_cast<std::size_t>(n), 99.0f), added = numbers(50, n), expected = added;
      const std::vector<float> sum = sums(ranks, 0, n);
      for (std::size_t i = 0; i < sum.size(); ++i) expected[i] += sum[i];
      sum_in_rank_order(parts, n, replaced.data(), SumInto::Replace);
      sum_in_rank_order(parts, n, added.data(), SumInto::Add);
      EXPECT_TRUE(same_bits(replaced, sum)) << ranks << " parts of " << n;
      EXPECT_TRUE(same_bits(added, expected)) << ranks << " parts of " << n;
    }
}

TEST(RankOrderSum, APartMayBeReplacedByTheSum) {
  for (const int ranks : {1, 2, 3, 4, 7})
    for (int own = 0; own < ranks; ++own) {
      std::vector<std::vector<float>> contributions;
      std::vector<const float*> parts;
      for (int r = 0; r < ranks; ++r) contributions.push_back(numbers(r, 3001));
      for (const auto& c : contributions) parts.push_back(c.data());
      std::vector<float>& out = contributions[static_cast<std::size_t>(own)];
      sum_in_rank_order(parts, 3001, out.data(), SumInto::Replace);
      EXPECT_TRUE(same_bits(out, sums(ranks, 0, 3001))) << "part " << own << " of " << ranks;
    }
}

}  // namespace
}  // namespace regather::conformance
