#include "tensor/ops/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace regather {
namespace {

std::vector<float> normal(std::size_t n, unsigned seed, float scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> d(0, scale);
  std::vector<float> x(n);
  for (float& v : x) v = d(random);
  return x;
}

constexpr std::size_t kOdd = 1037;

TEST(AdamW, equals_a_plain_reference_in_double) {
  std::vector<float> p = normal(kOdd, 1), m(kOdd), v(kOdd);
  std::vector<double> rp(p.begin(), p.end()), rm(kOdd), rv(kOdd);
  for (int step = 1; step <= 20; ++step) {
    const std::vector<float> g = normal(kOdd, 100 + static_cast<unsigned>(step), 0.1F);
    const AdamWStep s = {.lr = 1e-2F,
                         .beta1 = 0.9F,
                         .beta2 = 0.95F,
                         .eps = 1e-8F,
                         .weight_decay = 0.1F,
                         .step = step,
                         .gradient_scale = 0.5F};
    adamw(p.data(), m.data(), v.data(), g.data(), static_cast<std::int64_t>(kOdd), s);
    for (std::size_t i = 0; i < kOdd; ++i) {
      const double x = 0.5 * static_cast<double>(g[i]), b1 = s.beta1, b2 = s.beta2, lr = s.lr;
      rm[i] = b1 * rm[i] + (1 - b1) * x;
      rv[i] = b2 * rv[i] + (1 - b2) * x * x;
      rp[i] *= 1 - lr * static_cast<double>(s.weight_decay);
      rp[i] -= lr * (rm[i] / (1 - std::pow(b1, step))) /
               (std::sqrt(rv[i] / (1 - std::pow(b2, step))) + static_cast<double>(s.eps));
    }
  }
  for (std::size_t i = 0; i < kOdd; ++i) {
    EXPECT_NEAR(p[i], rp[i], 2e-6) << i;
    EXPECT_NEAR(m[i], rm[i], 1e-7) << i;
    EXPECT_NEAR(v[i], rv[i], 1e-7) << i;
  }
}

TEST(AdamW, decays_exactly_and_only_by_the_rate_times_the_decay) {
  const std::vector<float> before = normal(kOdd, 2), zero(kOdd);
  std::vector<float> p = before, m(kOdd), v(kOdd);
  adamw(p.data(), m.data(), v.data(), zero.data(), static_cast<std::int64_t>(kOdd),
        {.lr = 1e-2F, .weight_decay = 0.5F});
  const float factor = static_cast<float>(1.0 - static_cast<double>(1e-2F) * 0.5);
  for (std::size_t i = 0; i < kOdd; ++i) ASSERT_EQ(p[i], before[i] * factor);
  p = before;
  adamw(p.data(), m.data(), v.data(), zero.data(), static_cast<std::int64_t>(kOdd), {.lr = 1e-2F, .weight_decay = 0});
  EXPECT_EQ(p, before);
}

TEST(AdamW, gives_the_same_bits_for_any_split_and_alignment) {
  const std::vector<float> g = normal(kOdd, 3), start = normal(kOdd, 4);
  const AdamWStep s = {.lr = 1e-3F, .weight_decay = 0.1F, .step = 2};
  std::vector<float> p = start, m(kOdd, 0.1F), v(kOdd, 0.2F);
  adamw(p.data(), m.data(), v.data(), g.data(), static_cast<std::int64_t>(kOdd), s);
  for (std::size_t cut : {std::size_t{1}, std::size_t{5}, std::size_t{513}, kOdd - 1}) {
    std::vector<float> q = start, n(kOdd, 0.1F), w(kOdd, 0.2F);
    adamw(q.data(), n.data(), w.data(), g.data(), static_cast<std::int64_t>(cut), s);
    adamw(q.data() + cut, n.data() + cut, w.data() + cut, g.data() + cut, static_cast<std::int64_t>(kOdd - cut), s);
    EXPECT_EQ(p, q);
    EXPECT_EQ(m, n);
    EXPECT_EQ(v, w);
  }
}

TEST(Sgd, equals_a_plain_reference_in_double) {
  std::vector<float> p = normal(kOdd, 5), buffer(kOdd), plain = p;
  std::vector<double> rp(p.begin(), p.end()), rb(kOdd), rplain = rp;
  for (int step = 0; step < 5; ++step) {
    const std::vector<float> g = normal(kOdd, 200 + static_cast<unsigned>(step));
    sgd(p.data(), buffer.data(), g.data(), static_cast<std::int64_t>(kOdd),
        {.lr = 0.1F, .momentum = 0.9F, .weight_decay = 0.01F, .gradient_scale = 2});
    sgd(plain.data(), nullptr, g.data(), static_cast<std::int64_t>(kOdd), {.lr = 0.1F});
    for (std::size_t i = 0; i < kOdd; ++i) {
      rb[i] = 0.9 * rb[i] + 2.0 * static_cast<double>(g[i]) + 0.01 * rp[i];
      rp[i] -= 0.1 * rb[i];
      rplain[i] -= 0.1 * static_cast<double>(g[i]);
    }
  }
  for (std::size_t i = 0; i < kOdd; ++i) {
    EXPECT_NEAR(p[i], rp[i], 1e-5);
    EXPECT_NEAR(plain[i], rplain[i], 1e-5);
  }
}

TEST(SumOfSquares, is_a_sum_in_double_over_any_size) {
  for (std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{31}, kOdd, std::size_t{600001}}) {
    const std::vector<float> x = normal(n, 6, 1e10F);
    double expected = 0;
    for (float v : x) expected += static_cast<double>(v) * static_cast<double>(v);
    EXPECT_NEAR(sum_of_squares(x.data(), static_cast<std::int64_t>(n)), expected, 1e-12 * expected);
  }
}

TEST(Accumulate, adds) {
  std::vector<float> a = normal(kOdd, 7);
  const std::vector<float> b = normal(kOdd, 8), before = a;
  accumulate(a.data(), b.data(), static_cast<std::int64_t>(kOdd));
  for (std::size_t i = 0; i < kOdd; ++i) ASSERT_EQ(a[i], before[i] + b[i]);
}

TEST(CountNonfinite, finds_every_one) {
  std::vector<float> x = normal(300001, 9);
  const auto size = static_cast<std::int64_t>(x.size());
  x[1] = std::numeric_limits<float>::max();
  x[2] = std::numeric_limits<float>::denorm_min();
  EXPECT_TRUE(all_finite(x.data(), size));
  x[0] = std::numeric_limits<float>::infinity();
  x[777] = -std::numeric_limits<float>::infinity();
  x[300000] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(count_nonfinite(x.data(), size), 3);
  EXPECT_FALSE(all_finite(x.data(), size));
}

}  // namespace
}  // namespace regather
