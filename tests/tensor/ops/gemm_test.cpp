#include "tensor/ops/gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace regather {
namespace {

using Gemm = void (*)(std::int64_t, std::int64_t, std::int64_t, const float*, const float*, float*, Into, RowStrides);
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

struct Operands {
  std::int64_t m, n, k;
  std::vector<float> a = numbers(m * k, 1), b = numbers(n * k, 2), c = numbers(m * n, 3);
};

// A begins `offset` floats after the start of an allocation, B and C elsewhere.
std::vector<float> product(Gemm f, const Operands& x, Into into, std::int64_t offset) {
  const auto shifted = [](const std::vector<float>& values, std::int64_t by) {
    std::vector<float> y(static_cast<std::size_t>(by));
    y.insert(y.end(), values.begin(), values.end());
    return y;
  };
  const std::vector<float> a = shifted(x.a, offset), b = shifted(x.b, 3 * offset);
  std::vector<float> c = shifted(x.c, 2 * offset);
  f(x.m, x.n, x.k, a.data() + offset, b.data() + 3 * offset, c.data() + 2 * offset, into, {});
  return {c.begin() + 2 * offset, c.end()};
}

TEST(Gemm, equals_a_plain_product) {
  for (const auto& form : kForms)
    for (Into into : {Into::Write, Into::Add}) {
      const Operands x{23, 37, 51};
      const auto [m, n, k, a, b, c] = x;
      const std::vector<float> y = product(form.f, x, into, 0);
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
  const Operands all[] = {{1, 768, 768},   {64, 257, 32},   {200, 384, 96},
                          {130, 300, 513}, {40, 1024, 768}, {513, 7, 129}};
  for (const Operands& x : all)
    for (const auto& form : kForms)
      for (Into into : {Into::Write, Into::Add}) {
        const std::vector<float> aligned = product(form.f, x, into, 0);
        for (std::int64_t offset : {1, 4, 7, 9}) {
          const std::vector<float> other = product(form.f, x, into, offset);
          ASSERT_EQ(std::memcmp(aligned.data(), other.data(), aligned.size() * 4), 0)
              << x.m << " x " << x.n << " x " << x.k << ", " << offset << " floats off";
        }
      }
}

TEST(Gemm, reads_and_writes_columns_of_wider_matrices) {
  const Operands x{23, 37, 51};
  for (const auto& form : kForms)
    for (Into into : {Into::Write, Into::Add}) {
      const std::vector<float> dense = product(form.f, x, into, 0);
      const std::int64_t rows_a = form.transposed_a ? x.k : x.m, columns_a = form.transposed_a ? x.m : x.k;
      const std::int64_t wide_a = columns_a + 9, wide_c = x.n + 5;
      std::vector<float> a(static_cast<std::size_t>(rows_a * wide_a), NAN),
          c(static_cast<std::size_t>(x.m * wide_c), 7.0F);
      for (std::int64_t i = 0; i < rows_a; ++i)
        std::copy_n(x.a.data() + i * columns_a, columns_a, a.data() + i * wide_a + 4);
      for (std::int64_t i = 0; i < x.m; ++i) std::copy_n(x.c.data() + i * x.n, x.n, c.data() + i * wide_c + 2);
      form.f(x.m, x.n, x.k, a.data() + 4, x.b.data(), c.data() + 2, into, {.a = wide_a, .c = wide_c});
      for (std::int64_t i = 0; i < x.m; ++i)
        for (std::int64_t j = 0; j < wide_c; ++j) {
          const float got = c[static_cast<std::size_t>(i * wide_c + j)];
          if (j >= 2 && j < x.n + 2)
            ASSERT_NEAR(got, dense[static_cast<std::size_t>(i * x.n + j - 2)], 1e-5) << i << ", " << j;
          else
            ASSERT_EQ(got, 7.0F) << i << ", " << j;
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
