// gelu, swiglu, add, dropout.
#include <cmath>

#include "tensor/ops/add.h"
#include "tensor/ops/dropout.h"
#include "tensor/ops/gelu.h"
#include "tensor/ops/swiglu.h"
#include "tests/tensor/ops/op_case.h"

namespace regather::testing {
namespace {

OpCase gelu_case(std::string name, Shape x) {
  return {.name = std::move(name),
          .inputs = {{x}},
          .params = {},
          .apply = [](Run& run, const Activations& a) { return gelu(run, a[0]); },
          .reference =
              [](const std::vector<Doubles>& a, const std::vector<Doubles>&) {
                Doubles y = a[0];
                for (double& v : y) v = 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
                return y;
              }};
}

OpCase swiglu_case(std::string name, Shape x) {
  return {.name = std::move(name),
          .inputs = {{x}, {x}},
          .params = {},
          .apply = [](Run& run, const Activations& a) { return swiglu(run, a[0], a[1]); },
          .reference =
              [](const std::vector<Doubles>& a, const std::vector<Doubles>&) {
                Doubles y = a[0];
                for (std::size_t i = 0; i < y.size(); ++i) y[i] = a[0][i] / (1 + std::exp(-a[0][i])) * a[1][i];
                return y;
              }};
}

OpCase add_case(std::string name, Shape x) {
  return {.name = std::move(name),
          .inputs = {{x}, {x}},
          .params = {},
          .apply = [](Run& run, const Activations& a) { return add(run, a[0], a[1]); },
          .reference =
              [](const std::vector<Doubles>& a, const std::vector<Doubles>&) {
                Doubles y = a[0];
                for (std::size_t i = 0; i < y.size(); ++i) y[i] += a[1][i];
                return y;
              }};
}

OpCase dropout_case(std::string name, Shape x, float rate) {
  return {.name = std::move(name),
          .inputs = {{x}},
          .params = {},
          .apply = [rate](Run& run, const Activations& a) { return dropout(run, a[0], rate); },
          .reference =
              [=](const std::vector<Doubles>& a, const std::vector<Doubles>&) {
                Doubles y = a[0];
                const std::size_t size = static_cast<std::size_t>(x.dim(1) * x.dim(2));
                for (std::size_t i = 0; i < y.size(); ++i) {
                  const std::size_t e = i % size;
                  const bool keep = kTestKey.quad(i / size, e / 4)[e % 4] >= dropout_threshold(rate);
                  y[i] = keep ? y[i] / (1 - static_cast<double>(rate)) : 0;
                }
                return y;
              }};
}

INSTANTIATE_TEST_SUITE_P(Gelu, OpCases,
                         ::testing::Values(gelu_case("tail", {3, 7, 5}), gelu_case("whole", {4, 64}),
                                           gelu_case("one", {1})),
                         case_name);
INSTANTIATE_TEST_SUITE_P(SwiGlu, OpCases,
                         ::testing::Values(swiglu_case("tail", {3, 7, 5}), swiglu_case("whole", {4, 64})), case_name);
INSTANTIATE_TEST_SUITE_P(Add, OpCases, ::testing::Values(add_case("tail", {3, 7, 5}), add_case("whole", {4, 64})),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Dropout, OpCases,
                         ::testing::Values(dropout_case("tenth", {2, 7, 5}, 0.1F),
                                           dropout_case("half", {3, 11, 64}, 0.5F)),
                         case_name);

TEST(Gelu, is_right_far_from_zero) {
  OpCase c = gelu_case("", {9});
  CpuDevice device;
  const ParamView none;
  Tensor x(device.memory, {9}, Tag::Activations);
  const float far[9] = {-1e30F, -1000, -88, -20, -10, 10, 88, 1000, 1e12F};
  std::copy_n(far, 9, x.fresh());
  regather::Run r{device, none};
  const Tensor y = gelu(r, x);
  for (int i = 0; i < 5; ++i) EXPECT_NEAR(y.data()[i], 0, 1e-20) << far[i];
  for (int i = 5; i < 9; ++i) EXPECT_EQ(y.data()[i], far[i]);
}

TEST(SwiGlu, says_both_sides_of_a_mismatch) {
  OpCase c = swiglu_case("", {2, 3});
  c.inputs[1] = {{2, 4}};
  expect_case_error(c, {"swiglu", "gate is [2, 3]", "up is [2, 4]"});
}

TEST(Add, says_both_sides_of_a_mismatch) {
  OpCase c = add_case("", {2, 3});
  c.inputs[1] = {{2, 4}};
  expect_case_error(c, {"add", "a is [2, 3]", "b is [2, 4]"});
}

TEST(Dropout, drops_about_the_asked_part_and_nothing_in_evaluation) {
  const OpCase c = dropout_case("", {2, 100, 100}, 0.25F);
  const std::vector<float> y = run(c).y;
  const auto dropped = std::count(y.begin(), y.end(), 0.0F);
  EXPECT_NEAR(static_cast<double>(dropped) / static_cast<double>(y.size()), 0.25, 0.01);
  const std::vector<float> kept = evaluate(c);
  EXPECT_EQ(std::count(kept.begin(), kept.end(), 0.0F), 0);
}

TEST(Dropout, refuses_a_rate_that_is_none) {
  for (float rate : {-0.1F, 1.0F, 1.5F}) expect_error([&] { dropout_threshold(rate); }, {"dropout", "[0, 1)"});
}

}  // namespace
}  // namespace regather::testing
