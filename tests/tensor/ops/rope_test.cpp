#include "tensor/ops/rope.h"

#include <cmath>

#include "tests/tensor/ops/op_case.h"

namespace regather::testing {
namespace {

OpCase rope_case(std::string name, Shape qkv, std::int64_t heads, std::int64_t kv_heads, double theta = 10000) {
  return {.name = std::move(name),
          .inputs = {{qkv}},
          .params = {},
          .apply = [=](Run& run, const Activations& a) { return rope(run, a[0], heads, kv_heads, theta); },
          .reference =
              [=](const std::vector<Doubles>& a, const std::vector<Doubles>&) {
                const std::int64_t size = qkv.cols() / (heads + 2 * kv_heads), half = size / 2;
                Doubles y = a[0];
                for (std::int64_t row = 0; row < qkv.rows(); ++row)
                  for (std::int64_t h = 0; h < heads + kv_heads; ++h)
                    for (std::int64_t i = 0; i < half; ++i) {
                      const double angle = static_cast<double>(row % qkv.dim(1)) *
                                           std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(size));
                      const std::size_t p = static_cast<std::size_t>(row * qkv.cols() + h * size + i),
                                        q = p + static_cast<std::size_t>(half);
                      y[p] = a[0][p] * std::cos(angle) - a[0][q] * std::sin(angle);
                      y[q] = a[0][q] * std::cos(angle) + a[0][p] * std::sin(angle);
                    }
                return y;
              }};
}

INSTANTIATE_TEST_SUITE_P(Rope, OpCases,
                         ::testing::Values(rope_case("small", {2, 5, 24}, 2, 1),
                                           rope_case("grouped", {2, 130, 64}, 4, 2),
                                           rope_case("large_theta", {1, 70, 96}, 1, 1, 500000)),
                         case_name);

// The cosine of pair i at token t is what a unit vector turns into.
TEST(Rope, angles_are_exact_at_any_length) {
  constexpr std::int64_t kTokens = 4200, kSize = 64;
  CpuDevice device;
  const ParamView none;
  Tensor qkv(device.memory, {1, kTokens, 3 * kSize}, Tag::Activations);
  std::fill_n(qkv.fresh(), qkv.numel(), 0.0F);
  for (std::int64_t t = 0; t < kTokens; ++t) std::fill_n(qkv.fresh() + t * 3 * kSize, kSize / 2, 1.0F);
  regather::Run r{device, none};
  const Tensor y = rope(r, qkv, 1, 1, 10000);
  double error = 0;
  for (std::int64_t t = 0; t < kTokens; ++t)
    for (std::int64_t i = 0; i < kSize / 2; ++i) {
      const double angle = static_cast<double>(t) * std::pow(10000.0, -2.0 * static_cast<double>(i) / kSize);
      const float* row = y.data() + t * 3 * kSize;
      error = std::max({error, std::abs(static_cast<double>(row[i]) - std::cos(angle)),
                        std::abs(static_cast<double>(row[kSize / 2 + i]) - std::sin(angle))});
    }
  EXPECT_LT(error, 1e-6);
  const float *row256 = y.data() + 256 * 3 * kSize, *row257 = row256 + 3 * kSize;
  for (int i = 0; i < 20; ++i) EXPECT_NE(row256[i], row257[i]);
}

// Tables of cosines in bf16 would turn positions 256 and 257 alike, and others by the wrong angle.
TEST(Rope, of_bf16_turns_by_the_same_angles) {
  constexpr std::int64_t kTokens = 1024, kSize = 64;
  CpuDevice device;
  const ParamView none;
  Tensor qkv(device.memory, {1, kTokens, 3 * kSize}, Tag::Activations, DType::BF16);
  constexpr Bf16 kOne{0x3F80};
  std::fill_n(qkv.fresh<Bf16>(), qkv.numel(), Bf16{});
  for (std::int64_t t = 0; t < kTokens; ++t) std::fill_n(qkv.fresh<Bf16>() + t * 3 * kSize, kSize / 2, kOne);
  regather::Run r{device, none};
  const Tensor y = rope(r, qkv, 1, 1, 10000);
  for (std::int64_t t = 0; t < kTokens; ++t)
    for (std::int64_t i = 0; i < kSize / 2; ++i) {
      const double angle = static_cast<double>(t) * std::pow(10000.0, -2.0 * static_cast<double>(i) / kSize);
      const double cosine = std::cos(angle), sine = std::sin(angle);
      const Bf16* row = y.data<Bf16>() + t * 3 * kSize;
      ASSERT_NEAR(to_float(row[i]), cosine, std::abs(cosine) / 256 + 1e-6) << t << ", " << i;
      ASSERT_NEAR(to_float(row[kSize / 2 + i]), sine, std::abs(sine) / 256 + 1e-6) << t << ", " << i;
    }
}

TEST(Rope, says_both_sides_of_a_mismatch) {
  OpCase c = rope_case("", {1, 4, 30}, 2, 1);
  c.inputs[0].shape = {1, 4, 28};
  expect_case_error(c, {"rope", "qkv is [1, 4, 28]", "4 D", "D even"});
}

}  // namespace
}  // namespace regather::testing
