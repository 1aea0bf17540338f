// What every operation has to do, on a CPU.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "tests/tensor/ops/op_case.h"

namespace regather::testing {

TEST_P(OpCases, equals_the_reference) {
  const OpCase& c = GetParam();
  const Doubles expected = c.reference(values_of_inputs(c), values_of_params(c));
  const double bound = c.tolerance * std::max(1.0, largest(expected));
  const std::vector<float> y = run(c).y;
  ASSERT_EQ(y.size(), expected.size());
  for (std::size_t i = 0; i < y.size(); ++i) ASSERT_NEAR(y[i], expected[i], bound) << "element " << i;
}

TEST_P(OpCases, gradients_equal_finite_differences) {
  const OpCase& c = GetParam();
  const Result result = run(c);
  const Doubles dy = output_gradient(result.y.size());
  auto in = values_of_inputs(c), params = values_of_params(c);
  const auto objective = [&] {
    const Doubles y = c.reference(in, params);
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += y[i] * dy[i];
    return sum;
  };
  constexpr double kStep = 1e-5;
  std::mt19937 random(33);
  const auto check_tensor = [&](Doubles& x, const std::vector<float>& gradient, double base, const std::string& what) {
    ASSERT_EQ(gradient.size(), x.size()) << what;
    std::vector<std::size_t> order(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    order.resize(std::min<std::size_t>(order.size(), static_cast<std::size_t>(c.coordinates)));
    double scale = 0;
    for (float g : gradient) scale = std::max(scale, std::abs(static_cast<double>(g) - base));
    const double bound = 2 * c.tolerance * std::max(scale, 0.1);
    for (std::size_t i : order) {
      const double before = x[i];
      x[i] = before + kStep;
      const double up = objective();
      x[i] = before - kStep;
      const double slope = (up - objective()) / (2 * kStep);
      x[i] = before;
      ASSERT_NEAR(static_cast<double>(gradient[i]) - base, slope, bound) << what << ", element " << i;
    }
    for (int direction = 0; direction < 2; ++direction) {
      const Doubles before = x;
      Doubles sign(x.size());
      double expected = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        sign[i] = (random() & 1U) != 0 ? 1 : -1;
        expected += sign[i] * (static_cast<double>(gradient[i]) - base);
      }
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = before[i] + kStep * sign[i];
      const double up = objective();
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = before[i] - kStep * sign[i];
      const double slope = (up - objective()) / (2 * kStep);
      x = before;
      ASSERT_NEAR(expected, slope, bound * std::sqrt(static_cast<double>(x.size()))) << what << ", all elements";
    }
  };
  for (std::size_t i = 0; i < c.inputs.size(); ++i)
    if (c.inputs[i].dtype == DType::F32 && c.inputs[i].differentiable)
      check_tensor(in[i], result.din.at(i), 0, "gradient of input " + std::to_string(i));
  for (std::size_t k = 0; k < c.params.size(); ++k)
    check_tensor(params[k], result.dparam[k], kGradientBase, "gradient of parameter " + std::to_string(k));
}

TEST_P(OpCases, gives_the_same_bits_again_and_when_rerun) {
  const OpCase& c = GetParam();
  const Result first = run(c);
  EXPECT_TRUE(first == run(c)) << "run twice";
  EXPECT_TRUE(first == run(c, {.plan = drop_all()})) << "with everything dropped and rerun";
}

TEST_P(OpCases, gives_the_same_bits_wherever_its_memory_is) {
  const OpCase& c = GetParam();
  const Result aligned = run(c);
  for (int offset : {1, 2, 3, 5, 8, 13})
    EXPECT_TRUE(aligned ==
                run(c, {.param_offset = offset, .gradient_offset = 16 - offset, .shift_bytes = 4 * offset + 4096}))
        << "parameters " << offset << " floats off";
}

TEST_P(OpCases, gives_the_same_bits_with_any_number_of_threads) {
  if (GetParam().splits_products) GTEST_SKIP() << "a product is split over threads";
  const int before = omp_get_max_threads();
  omp_set_num_threads(1);
  const Result one = run(GetParam());
  for (int threads : {2, 3}) {
    omp_set_num_threads(threads);
    EXPECT_TRUE(one == run(GetParam())) << threads << " threads";
  }
  omp_set_num_threads(before);
}

TEST_P(OpCases, gives_the_same_gradients_when_others_are_not_wanted) {
  const OpCase& c = GetParam();
  const Result all = run(c);
  Set inputs = 0;
  for (std::size_t i = 0; i < c.inputs.size(); ++i)
    if (c.inputs[i].dtype == DType::F32 && c.inputs[i].differentiable) inputs |= Set{1} << i;
  const Set params = (Set{1} << c.params.size()) - 1;
  for (Set fixed = 0; fixed <= inputs; ++fixed)
    for (Set frozen = 0; frozen <= params; ++frozen) {
      if ((fixed & ~inputs) != 0 || (fixed == inputs && frozen == params)) continue;
      const Result some = run(c, {.frozen_params = frozen, .fixed_inputs = fixed});
      EXPECT_TRUE(same_bits(some.y, all.y));
      for (std::size_t i = 0; i < c.inputs.size(); ++i) {
        if (has(inputs & ~fixed, i))
          EXPECT_TRUE(same_bits(some.din[i], all.din[i])) << "input " << i << ", frozen " << frozen;
        else
          EXPECT_TRUE(some.din[i].empty());
      }
      for (std::size_t k = 0; k < c.params.size(); ++k) {
        if (has(frozen, k))
          EXPECT_TRUE(some.dparam[k].empty());
        else
          EXPECT_TRUE(same_bits(some.dparam[k], all.dparam[k])) << "parameter " << k << ", fixed " << fixed;
      }
    }
}

// Elements are rounded when they are stored, and nowhere else: arithmetic is fp32, and so are gradients of parameters.
TEST_P(OpCases, in_bf16_equals_fp32_of_the_same_numbers_but_for_a_rounding) {
  const OpCase& c = GetParam();
  constexpr double kRounding = 1.0 / 256;
  const Result fp32 = run(c, {.values = Values::Rounded}), bf16 = run(c, {.values = Values::Bf16});
  const auto expect_rounded = [&](const std::vector<float>& got, const std::vector<float>& exact, int roundings,
                                  double base, const std::string& what) {
    ASSERT_EQ(got.size(), exact.size()) << what;
    double scale = 1.0;
    for (float x : exact) scale = std::max(scale, std::abs(static_cast<double>(x) - base));
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double x = exact[i];
      // What was rounded before takes part in sums of the size of the whole tensor.
      const double bound = roundings * kRounding * (roundings == 1 ? std::abs(x) : scale) + 2 * c.tolerance * scale;
      ASSERT_NEAR(got[i], x, bound) << what << ", element " << i;
    }
  };
  expect_rounded(bf16.y, fp32.y, c.roundings, 0, "output");
  for (std::size_t i = 0; i < fp32.din.size(); ++i)
    expect_rounded(bf16.din[i], fp32.din[i], c.gradient_roundings, 0, "gradient of input " + std::to_string(i));
  for (std::size_t k = 0; k < fp32.dparam.size(); ++k)
    expect_rounded(bf16.dparam[k], fp32.dparam[k], 0, kGradientBase, "gradient of parameter " + std::to_string(k));
}

TEST_P(OpCases, gives_the_same_bits_in_bf16_again_when_rerun_wherever_its_memory_is_and_with_threads) {
  const OpCase& c = GetParam();
  const Result first = run(c, {.values = Values::Bf16});
  EXPECT_TRUE(first == run(c, {.plan = drop_all(), .values = Values::Bf16})) << "dropped and rerun";
  for (int offset : {1, 5})
    EXPECT_TRUE(first == run(c, {.param_offset = offset, .shift_bytes = 2 * offset + 4096, .values = Values::Bf16}))
        << "parameters " << offset << " elements off";
  if (c.splits_products) return;
  const int before = omp_get_max_threads();
  omp_set_num_threads(3);
  EXPECT_TRUE(first == run(c, {.values = Values::Bf16})) << "3 threads";
  omp_set_num_threads(before);
}

}  // namespace regather::testing
