// layer_norm, rms_norm.
#include <cmath>

#include "tensor/ops/layer_norm.h"
#include "tensor/ops/rms_norm.h"
#include "tests/tensor/ops/op_case.h"

namespace regather::testing {
namespace {

Doubles normalised(const Doubles& x, std::size_t cols, bool centred) {
  Doubles y = x;
  for (std::size_t r = 0; r < x.size(); r += cols) {
    double mean = 0, square = 0;
    for (std::size_t i = 0; i < cols; ++i) mean += x[r + i] / static_cast<double>(cols);
    if (!centred) mean = 0;
    for (std::size_t i = 0; i < cols; ++i) square += (x[r + i] - mean) * (x[r + i] - mean) / static_cast<double>(cols);
    for (std::size_t i = 0; i < cols; ++i) y[r + i] = (x[r + i] - mean) / std::sqrt(square + 1e-5);
  }
  return y;
}

OpCase layer_norm_case(std::string name, Shape x) {
  return {.name = std::move(name),
          .inputs = {{x}},
          .params = {{x.cols()}, {x.cols()}},
          .apply = [](Run& run, const Activations& a) { return layer_norm(run, a[0], 0, 1); },
          .reference =
              [x](const std::vector<Doubles>& a, const std::vector<Doubles>& p) {
                const std::size_t cols = static_cast<std::size_t>(x.cols());
                Doubles y = normalised(a[0], cols, true);
                for (std::size_t i = 0; i < y.size(); ++i) y[i] = y[i] * p[0][i % cols] + p[1][i % cols];
                return y;
              }};
}

OpCase rms_norm_case(std::string name, Shape x) {
  return {.name = std::move(name),
          .inputs = {{x}},
          .params = {{x.cols()}},
          .apply = [](Run& run, const Activations& a) { return rms_norm(run, a[0], 0); },
          .reference =
              [x](const std::vector<Doubles>& a, const std::vector<Doubles>& p) {
                const std::size_t cols = static_cast<std::size_t>(x.cols());
                Doubles y = normalised(a[0], cols, false);
                for (std::size_t i = 0; i < y.size(); ++i) y[i] *= p[0][i % cols];
                return y;
              }};
}

INSTANTIATE_TEST_SUITE_P(LayerNorm, OpCases,
                         ::testing::Values(layer_norm_case("tail", {2, 5, 37}), layer_norm_case("whole", {3, 64}),
                                           layer_norm_case("many_rows", {2, 151, 24}),
                                           layer_norm_case("wide", {3, 1500}), layer_norm_case("wider", {2, 3001}),
                                           layer_norm_case("widest", {2, 5004})),
                         case_name);
INSTANTIATE_TEST_SUITE_P(RmsNorm, OpCases,
                         ::testing::Values(rms_norm_case("tail", {2, 5, 37}), rms_norm_case("whole", {3, 64}),
                                           rms_norm_case("many_rows", {2, 151, 24}), rms_norm_case("wide", {3, 1500})),
                         case_name);

TEST(LayerNorm, says_both_sides_of_a_mismatch) {
  OpCase c = layer_norm_case("", {2, 3, 8});
  c.params[1] = {7};
  expect_case_error(c, {"layer_norm", "bias is [7]", "x is [2, 3, 8] with C = 8"});
}
TEST(RmsNorm, says_both_sides_of_a_mismatch) {
  OpCase c = rms_norm_case("", {2, 3, 8});
  c.params[0] = {7};
  expect_case_error(c, {"rms_norm", "gain is [7]", "x is [2, 3, 8] with C = 8"});
}

}  // namespace
}  // namespace regather::testing
