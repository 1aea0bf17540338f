#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "tensor/ops/kernels.h"
#include "tensor/tensor.h"

namespace regather {
namespace {

std::vector<float> rounded(const Kernels& kernels, const std::vector<float>& x) {
  std::vector<Bf16> y(x.size());
  kernels.round(y.data(), x.data(), static_cast<std::int64_t>(x.size()));
  std::vector<float> wide(x.size());
  kernels.widen(wide.data(), y.data(), static_cast<std::int64_t>(y.size()));
  for (std::size_t i = 0; i < y.size(); ++i)
    EXPECT_EQ(std::bit_cast<std::uint32_t>(wide[i]), std::bit_cast<std::uint32_t>(to_float(y[i])));
  return wide;
}

template <class F>
void with_each_instruction_set(F f) {
  for (const Isa isa : {Isa::Baseline, Isa::Avx2, Isa::Avx512})
    if (const Kernels* kernels = kernels_for(isa)) {
      SCOPED_TRACE(name_of(isa));
      f(*kernels);
    }
}

TEST(Bf16, IsRoundedToNearestWithTiesToEven) {
  const float one_ulp = 0x1p-7F, infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> x = {0.0F,
                                -0.0F,
                                1.0F,
                                -1.0F,
                                1 + one_ulp / 2,            // a tie: down, to even
                                1 + one_ulp + one_ulp / 2,  // a tie: up, to even
                                std::nextafter(1 + one_ulp / 2, 2.0F),
                                std::nextafter(1 + one_ulp / 2, 0.0F),
                                -(1 + one_ulp / 2),
                                257.0F,
                                0x1.FEp127F,
                                std::numeric_limits<float>::max(),
                                infinity,
                                -infinity,
                                0x1p-149F,
                                0x1p-133F};
  const std::vector<float> expected = {0.0F,        -0.0F,     1.0F,  -1.0F,    1.0F,        1 + 2 * one_ulp,
                                       1 + one_ulp, 1.0F,      -1.0F, 256.0F,   0x1.FEp127F, infinity,
                                       infinity,    -infinity, 0.0F,  0x1p-133F};
  with_each_instruction_set([&](const Kernels& kernels) {
    const std::vector<float> y = rounded(kernels, x);
    for (std::size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(std::bit_cast<std::uint32_t>(y[i]), std::bit_cast<std::uint32_t>(expected[i])) << x[i];
    }
  });
}

// A NaN whose bits are all in the lower half would become an infinity if they were cut off.
TEST(Bf16, KeepsNaNs) {
  std::vector<float> x;
  for (const std::uint32_t bits : {0x7F800001U, 0x7FC00000U, 0x7FFFFFFFU, 0xFF800001U, 0xFFFFFFFFU})
    for (int i = 0; i < 5; ++i) x.push_back(std::bit_cast<float>(bits));
  with_each_instruction_set([&](const Kernels& kernels) {
    for (const float y : rounded(kernels, x)) EXPECT_TRUE(std::isnan(y));
  });
}

// Whatever is left of a row's last vector, and nothing behind it.
TEST(Bf16, IsStoredForAnyNumberOfElements) {
  with_each_instruction_set([&](const Kernels& kernels) {
    for (std::int64_t n = 0; n < 70; ++n) {
      std::vector<float> x(static_cast<std::size_t>(n));
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i) + 1;
      std::vector<Bf16> y(x.size() + 1, Bf16{0x1234});
      kernels.round(y.data(), x.data(), n);
      for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(to_float(y[i]), x[i]) << n;
      ASSERT_EQ(y.back(), Bf16{0x1234}) << n;
    }
  });
}

TEST(Bf16, SumsOfColumnsAreFp32) {
  const std::vector<float> rows(512, 1.0F);  // a bf16 sum of ones stops at 256
  std::vector<Bf16> x(rows.size());
  with_each_instruction_set([&](const Kernels& kernels) {
    kernels.round(x.data(), rows.data(), 512);
    float sum = 0;
    kernels.bf16.add_column_sums(&sum, x.data(), 512, 1, 1);
    EXPECT_EQ(sum, 512.0F);
  });
}

TEST(Tensor, IsReadAsWhatItIs) {
  Allocator memory;
  Tensor t(memory, {2, 3}, Tag::Activations, DType::BF16);
  EXPECT_EQ(memory.live(Tag::Activations), 12);
  EXPECT_NE(t.data<Bf16>(), nullptr);
  EXPECT_NE(t.data<void>(), nullptr);
  EXPECT_THROW(t.data(), LogicError);
  EXPECT_THROW(t.fresh<std::int32_t>(), LogicError);
}

}  // namespace
}  // namespace regather
