#include "tensor/ops/gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace regather {
namespace {

using Gemm = void (*)(std::int64_t, std::int64_t, std::int64_t, const float*, const float*, float*, Into);
constexpr struct {
  Gemm f;
  bool transposed_a, transposed_b;
} kForms[] = {{gemm_nt, false, true}, {gemm_nn, false, false}, {gemm_tn, true, false}};

std::vector<float> numbers(std::int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> d;
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& v : x) v = d(random);
  return x;
}

// The arrays begin `offset` floats after where they would, and C `2 offset` after.
std::vector<float> product(Gemm f, std::int64_t m, std::int64_t n, std::int64_t k, Into into, std::int64_t offset) {
  const std::vector<float> a = numbers(m * k, 1), b = numbers(n * k, 2), c = numbers(m * n, 3);
  const auto shifted = [](const std::vector<float>& x, std::int64_t by) {
    std::vector<float> y(static_cast<std::size_t>(by));
    y.insert(y.end(), x.begin(), x.end());
    return y;
  };
  const std::vector<float> a2 = shifted(a, offset), b2 = shifted(b, 3 * offset);
  std::vector<float> c2 = shifted(c, 2 * offset);
  f(m, n, k, a2.data() + offset, b2.data() + 3 * offset, c2.data() + 2 * offset, into);
  return {c2.begin() + 2 * offset, c2.end()};
}

TEST(Gemm, equals_a_plain_product) {
  for (const auto& form : kForms)
    for (Into into : {Into::Write, Into::Add}) {
      const std::int64_t m = 23, n = 37, k = 51;
      const std::vector<float> a = numbers(m * k, 1), b = numbers(n * k, 2), c = numbers(m * n, 3);
      const std::vector<float> y = product(form.f, m, n, k, into, 0);
      for (std::int64_t i = 0; i < m; ++i)
        for (std::int64_t j = 0; j < n; ++j) {
          double sum = into == Into::Add ? static_cast<double>(c[static_cast<std::size_t>(i * n + j)]) : 0;
          for (std::int64_t p = 0; p < k; ++p)
            sum += static_cast<double>(a[static_cast<std::size_t>(form.transposed_a ? p * m + i : i * k + p)]) *
                   static_cast<double>(b[static_cast<std::size_t>(form.transposed_b ? j * k + p : p * n + j)]);
          ASSERT_NEAR(y[static_cast<std::size_t>(i * n + j)], sum, 1e-4);
        }
    }
}

TEST(Gemm, gives_the_same_bits_for_any_alignment) {
  const std::int64_t sizes[][3] = {{1, 768, 768},   {64, 257, 32},   {200, 384, 96},
                                   {130, 300, 513}, {96, 1024, 768}, {513, 7, 129}};
  for (const auto& [m, n, k] : sizes)
    for (const auto& form : kForms)
      for (Into into : {Into::Write, Into::Add}) {
        const std::vector<float> aligned = product(form.f, m, n, k, into, 0);
        for (std::int64_t offset : {1, 3, 4, 6, 7, 9}) {
          const std::vector<float> other = product(form.f, m, n, k, into, offset);
          ASSERT_EQ(std::memcmp(aligned.data(), other.data(), aligned.size() * 4), 0)
              << m << " x " << n << " x " << k << ", " << offset << " floats off";
        }
      }
}

TEST(Gemm, takes_empty_sizes) {
  std::vector<float> c = {1, 2, 3, 4};
  gemm_nn(0, 2, 2, nullptr, c.data(), c.data(), Into::Write);
  gemm_nn(2, 0, 2, c.data(), nullptr, c.data(), Into::Write);
  gemm_nn(2, 2, 0, nullptr, nullptr, c.data(), Into::Add);
  EXPECT_EQ(c, (std::vector<float>{1, 2, 3, 4}));
  gemm_nn(2, 2, 0, nullptr, nullptr, c.data(), Into::Write);
  EXPECT_EQ(c, (std::vector<float>(4)));
}

}  // namespace
}  // namespace regather
