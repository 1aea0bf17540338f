#include "tensor/ops/adapted_linear.h"

#include "tests/tensor/ops/op_case.h"

namespace regather::testing {
namespace {

struct Part {
  std::int64_t first, rows, rank;
  float scale;
};

std::vector<Adapter> adapters_of(const std::vector<Part>& parts) {
  std::vector<Adapter> adapters;
  for (const Part& p : parts) adapters.push_back({.first = p.first, .rows = p.rows, .scale = p.scale});
  return adapters;
}

// y = x (w + sum of scale B A, each in its rows)^T + b
OpCase adapted_case(std::string name, Shape x, std::int64_t out, LinearBias bias, std::vector<Part> parts) {
  const std::int64_t in = x.cols();
  const std::size_t first = bias == LinearBias::Added ? 2 : 1;
  OpCase c{.name = std::move(name),
           .inputs = {{x}},
           .params = {{out, in}},
           .roundings = 3,  // each adapter adds to the output
           .gradient_roundings = 3};
  if (bias == LinearBias::Added) c.params.push_back({out});
  for (const Part& p : parts) {
    c.params.push_back({p.rank, in});
    c.params.push_back({p.rows, p.rank});
  }
  c.apply = [bias, parts, n = c.params.size()](Run& run, const Activations& a) {
    std::vector<int> ids;
    for (std::size_t k = 0; k < n; ++k) ids.push_back(static_cast<int>(k));
    return run.apply(make_adapted_linear(bias, adapters_of(parts)), {a[0]}, ids)[0];
  };
  c.reference = [=](const std::vector<Doubles>& a, const std::vector<Doubles>& p) {
    const auto rows = static_cast<std::size_t>(x.rows()), o = static_cast<std::size_t>(out),
               k = static_cast<std::size_t>(in);
    Doubles w = p[0];
    for (std::size_t n = 0; n < parts.size(); ++n) {
      const auto rank = static_cast<std::size_t>(parts[n].rank);
      const Doubles &down = p[first + 2 * n], &up = p[first + 2 * n + 1];
      for (std::size_t j = 0; j < static_cast<std::size_t>(parts[n].rows); ++j)
        for (std::size_t i = 0; i < k; ++i)
          for (std::size_t r = 0; r < rank; ++r)
            w[(static_cast<std::size_t>(parts[n].first) + j) * k + i] +=
                static_cast<double>(parts[n].scale) * up[j * rank + r] * down[r * k + i];
    }
    Doubles y(rows * o);
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t j = 0; j < o; ++j) {
        y[r * o + j] = bias == LinearBias::Added ? p[1][j] : 0;
        for (std::size_t i = 0; i < k; ++i) y[r * o + j] += a[0][r * k + i] * w[j * k + i];
      }
    return y;
  };
  return c;
}

INSTANTIATE_TEST_SUITE_P(
    AdaptedLinear, OpCases,
    ::testing::Values(adapted_case("with_bias", {2, 5, 7}, 11, LinearBias::Added, {{0, 11, 3, 2.0F}}),
                      adapted_case("without_bias", {3, 4, 16}, 8, LinearBias::None, {{0, 8, 1, 0.5F}}),
                      adapted_case("some_rows", {2, 6, 9}, 12, LinearBias::None, {{4, 5, 2, 1.5F}}),
                      adapted_case("two_parts_of_different_rank", {2, 37, 24}, 40, LinearBias::Added,
                                   {{0, 24, 4, 2.0F}, {32, 8, 8, 0.25F}}),
                      adapted_case("one_row", {1, 33}, 5, LinearBias::Added, {{0, 5, 4, 4.0F}})),
    case_name);

TEST(AdaptedLinear, says_both_sides_of_a_mismatch) {
  OpCase c = adapted_case("", {2, 3, 8}, 4, LinearBias::Added, {{0, 4, 2, 1.0F}});
  c.params[3] = {5, 2};
  expect_case_error(c, {"adapted_linear", "A is [2, 8] and B is [5, 2]", "weight is [4, 8] of which 4 rows"});
  expect_case_error(adapted_case("", {2, 3, 8}, 4, LinearBias::None, {{2, 3, 2, 1.0F}}), {"rows 2 to 5 of a weight"});
}

// Through linear(), by the description of the weight: what is saved for which of them trained.
class Source final : public ParamSource {
 public:
  Source(bool weight, bool down, bool up)
      : table_{{.name = "w",
                .shape = {4, 8},
                .trainable = weight,
                .adapters = {{.down = 1, .up = 2, .first = 0, .rows = 4, .scale = 2.0F}}},
               {.name = "w.lora_A.weight", .shape = {2, 8}, .trainable = down},
               {.name = "w.lora_B.weight", .shape = {4, 2}, .trainable = up}} {}
  const std::vector<ParamInfo>& table() const override { return table_; }
  const void* data(int) override { return values_.data(); }
  DType dtype() const override { return DType::F32; }

 private:
  std::vector<ParamInfo> table_;
  std::vector<float> values_ = std::vector<float>(32, 1.0F);
};

std::int64_t bytes_kept(bool weight, bool down, bool up) {
  CpuDevice device;
  Source source(weight, down, up);
  const ParamView view(source);
  Tape tape(device, drop_all());
  regather::Run r{device, view, &tape};
  Tensor x(device.memory, {3, 8}, Tag::Activations);
  std::fill_n(x.fresh(), 24, 1.0F);
  Tensor input = tape.input(x, true);
  Tensor y = linear(r, input, 0);
  EXPECT_EQ(y.data()[0], 8 + 2.0F * 2 * 8) << "w x + scale B A x";
  tape.outputs({y});
  std::int64_t bytes = 0;
  for (const auto& value : tape.report())
    if (value.saved) bytes += value.bytes;
  return bytes;
}

TEST(AdaptedLinear, saves_its_input_only_if_a_matrix_is_trained) {
  EXPECT_EQ(bytes_kept(false, false, false), 0);
  for (const auto& [weight, down, up] : {std::array{true, false, false}, {false, true, false}, {false, false, true}})
    EXPECT_EQ(bytes_kept(weight, down, up), 3 * 8 * 4);
}

}  // namespace
}  // namespace regather::testing
