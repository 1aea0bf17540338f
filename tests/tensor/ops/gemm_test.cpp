#include "tensor/ops/gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tensor/ops/kernels.h"

namespace regather {
namespace {

using Gemm = void (*)(std::int64_t, std::int64_t, std::int64_t, ConstElements, ConstElements, Elements, Into,
                      RowStrides, float*);
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
  f(x.m, x.n, x.k, a.data() + offset, b.data() + 3 * offset, c.data() + 2 * offset, into, {}, nullptr);
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
      form.f(x.m, x.n, x.k, a.data() + 4, x.b.data(), c.data() + 2, into, {.a = wide_a, .c = wide_c}, nullptr);
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
  const float* none = nullptr;
  gemm_nn(0, 2, 2, none, c.data(), c.data(), Into::Write);
  gemm_nn(2, 0, 2, c.data(), none, c.data(), Into::Write);
  gemm_nn(2, 2, 0, none, none, c.data(), Into::Add);
  EXPECT_EQ(c, (std::vector<float>{1, 2, 3, 4}));
  gemm_nn(2, 2, 0, none, none, c.data(), Into::Write);
  EXPECT_EQ(c, (std::vector<float>(4)));
  std::vector<Bf16> rounded(4, Bf16{1});
  gemm_nn(2, 2, 0, none, none, rounded.data(), Into::Write);
  EXPECT_EQ(rounded, (std::vector<Bf16>(4)));
}

std::vector<Bf16> rounded(const std::vector<float>& x) {
  std::vector<Bf16> y(x.size());
  kernels().round(y.data(), x.data(), static_cast<std::int64_t>(x.size()));
  return y;
}
std::vector<float> widened(const std::vector<Bf16>& x) {
  std::vector<float> y(x.size());
  std::transform(x.begin(), x.end(), y.begin(), to_float);
  return y;
}

// Every matrix of the product in bf16 or not; sizes that take one piece, several, and a last one that is smaller.
TEST(Gemm, of_bf16_is_the_fp32_product_of_the_same_numbers_rounded_once) {
  for (const Operands& x : {Operands{23, 37, 51}, Operands{70, 1100, 1090}, Operands{1060, 40, 2100}})
    for (const auto& form : kForms)
      for (const bool bf16_a : {false, true})
        for (const bool bf16_c : {false, true})
          for (const Into into : {Into::Write, Into::Add}) {
            const auto a = rounded(x.a), b = rounded(x.b);
            auto c = rounded(x.c);
            Operands same{x.m, x.n, x.k, widened(a), widened(b), widened(c)};
            const std::vector<float> exact = product(form.f, same, into, 0);
            std::vector<float> scratch(static_cast<std::size_t>(gemm_scratch(DType::BF16, x.m, x.n, x.k) / 4), NAN);
            form.f(x.m, x.n, x.k, bf16_a ? ConstElements(a.data()) : same.a.data(), b.data(),
                   bf16_c ? Elements(c.data()) : same.c.data(), into, {}, scratch.data());
            const std::vector<float> got = bf16_c ? widened(c) : same.c;
            const double rounding = bf16_c ? 1.0 / 256 : 0;
            for (std::size_t i = 0; i < exact.size(); ++i)
              ASSERT_NEAR(got[i], exact[i], rounding * std::abs(static_cast<double>(exact[i])) + 2e-3) << i;
          }
}

TEST(Gemm, of_bf16_reads_and_writes_columns_of_wider_matrices) {
  const Operands x{23, 37, 51};
  const std::int64_t wide_a = x.k + 9, wide_c = x.n + 5;
  const auto a = rounded(x.a), b = rounded(x.b), c = rounded(x.c);
  std::vector<float> scratch(static_cast<std::size_t>(gemm_scratch(DType::BF16, x.m, x.n, x.k) / 4));
  for (Into into : {Into::Write, Into::Add}) {
    std::vector<Bf16> dense = c, columns_a(static_cast<std::size_t>(x.m * wide_a)),
                      columns_c(static_cast<std::size_t>(x.m * wide_c), Bf16{7});
    gemm_nt(x.m, x.n, x.k, a.data(), b.data(), dense.data(), into, {}, scratch.data());
    for (std::int64_t i = 0; i < x.m; ++i) {
      std::copy_n(a.data() + i * x.k, x.k, columns_a.data() + i * wide_a + 4);
      std::copy_n(c.data() + i * x.n, x.n, columns_c.data() + i * wide_c + 2);
    }
    gemm_nt(x.m, x.n, x.k, columns_a.data() + 4, b.data(), columns_c.data() + 2, into, {.a = wide_a, .c = wide_c},
            scratch.data());
    for (std::int64_t i = 0; i < x.m; ++i)
      for (std::int64_t j = 0; j < wide_c; ++j)
        ASSERT_EQ(columns_c[static_cast<std::size_t>(i * wide_c + j)],
                  j >= 2 && j < x.n + 2 ? dense[static_cast<std::size_t>(i * x.n + j - 2)] : Bf16{7});
  }
}

}  // namespace
}  // namespace regather
