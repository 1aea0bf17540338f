#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tensor/params.h"

namespace regather {
namespace {

ParamInfo normal_param(const std::string& name, std::int64_t n, float std = 0.5F) {
  return {.name = name, .shape = {n}, .init = normal(std)};
}

std::vector<float> whole(const ParamInfo& info, std::uint64_t seed) {
  std::vector<float> values(static_cast<std::size_t>(info.shape.numel()), NAN);
  initialize(info, seed, 0, info.shape.numel(), values.data());
  return values;
}

TEST(Init, EveryRangeOfAParameterHoldsTheNumbersOfTheWhole) {
  const ParamInfo info = normal_param("h.0.attn.c_attn.weight", 41);
  const std::vector<float> all = whole(info, 7);
  for (std::int64_t first = 0; first <= 41; ++first) {
    for (std::int64_t n = 0; first + n <= 41; ++n) {
      std::vector<float> part(static_cast<std::size_t>(n) + 2, -99.0F);
      initialize(info, 7, first, n, part.data() + 1);
      EXPECT_EQ(part.front(), -99.0F);
      EXPECT_EQ(part.back(), -99.0F);
      for (std::int64_t i = 0; i < n; ++i)
        ASSERT_EQ(part[static_cast<std::size_t>(i) + 1], all[static_cast<std::size_t>(first + i)])
            << first << " + " << i;
    }
  }
}

TEST(Init, SeedAndNameDecideTheNumbers) {
  const std::vector<float> a = whole(normal_param("a", 1000), 1);
  EXPECT_EQ(a, whole(normal_param("a", 1000), 1));
  const std::vector<float> other_seed = whole(normal_param("a", 1000), 2),
                           other_name = whole(normal_param("b", 1000), 1);
  int same_seed = 0, same_name = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    same_seed += a[i] == other_seed[i];
    same_name += a[i] == other_name[i];
  }
  EXPECT_LT(same_seed, 3);
  EXPECT_LT(same_name, 3);
}

TEST(Init, UniformValuesFillTheirRangeEvenly) {
  const std::int64_t n = 1 << 20;
  const ParamInfo info{.name = "h.0.attn.c_attn.lora_A.weight", .shape = {n}, .init = uniform(0.25F)};
  const std::vector<float> x = whole(info, 3);
  std::array<int, 16> counts{};
  double sum = 0, squares = 0, lagged = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double u = static_cast<double>(x[i]) / 0.25;
    ASSERT_GE(u, -1);
    ASSERT_LE(u, 1);
    ++counts[std::min<std::size_t>(15, static_cast<std::size_t>((u + 1) * 8))];
    sum += u;
    squares += u * u;
    if (i > 0) lagged += u * static_cast<double>(x[i - 1]) / 0.25;
  }
  const auto count = static_cast<double>(n);
  EXPECT_NEAR(sum / count, 0, 4 * std::sqrt(1.0 / 3 / count));
  EXPECT_NEAR(squares / count, 1.0 / 3, 4 * std::sqrt(4.0 / 45 / count));
  EXPECT_NEAR(lagged / count, 0, 4 * std::sqrt(1.0 / 9 / count));
  for (const int of_bin : counts) EXPECT_NEAR(of_bin, count / 16, 4 * std::sqrt(count / 16));
  std::vector<float> part(7);
  initialize(info, 3, 1001, 7, part.data());
  for (std::size_t i = 0; i < part.size(); ++i) EXPECT_EQ(part[i], x[1001 + i]);
}

TEST(Init, NormalValuesHaveTheMomentsOfANormalDistribution) {
  const std::int64_t n = 1 << 20;
  const std::vector<float> x = whole(normal_param("wte.weight", n, 0.5F), 3);
  double sum = 0, squares = 0, fourth = 0;
  std::array<double, 8> lagged{};
  int beyond_two = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double z = static_cast<double>(x[i]) / 0.5;
    sum += z;
    squares += z * z;
    fourth += z * z * z * z;
    beyond_two += std::abs(z) > 2;
    for (std::size_t lag = 1; lag <= lagged.size() && lag <= i; ++lag)
      lagged[lag - 1] += z * static_cast<double>(x[i - lag]) / 0.5;
  }
  const auto count = static_cast<double>(n);
  EXPECT_NEAR(sum / count, 0.0, 5e-3);
  EXPECT_NEAR(squares / count, 1.0, 1e-2);
  EXPECT_NEAR(fourth / count, 3.0, 5e-2);
  EXPECT_NEAR(beyond_two / count, 0.0455, 2e-3);
  for (const double product : lagged) EXPECT_NEAR(product / count, 0.0, 5e-3);  // neighbours are independent
}

TEST(Init, ZerosAndOnes) {
  EXPECT_EQ(whole({.name = "b", .shape = {3}, .init = zeros()}, 1), (std::vector<float>{0, 0, 0}));
  EXPECT_EQ(whole({.name = "g", .shape = {3}, .init = ones()}, 1), (std::vector<float>{1, 1, 1}));
}

TEST(Init, ARangeOutsideTheParameterIsRefused) {
  float value = 0;
  EXPECT_THROW(initialize(normal_param("a", 4), 1, 4, 1, &value), LogicError);
  EXPECT_THROW(initialize(normal_param("a", 4), 1, -1, 1, &value), LogicError);
}

}  // namespace
}  // namespace regather
