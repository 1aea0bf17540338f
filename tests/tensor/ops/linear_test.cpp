#include "tensor/ops/linear.h"

#include "tests/tensor/ops/op_case.h"

namespace regather::testing {
namespace {

enum class Bias { None, Some };

OpCase linear_case(std::string name, Shape x, std::int64_t out, Bias bias) {
  const std::int64_t in = x.cols();
  OpCase c{.name = std::move(name), .inputs = {{x}}, .params = {{out, in}}};
  if (bias == Bias::Some) c.params.push_back({out});
  c.apply = [bias](Run& run, const Activations& a) { return linear(run, a[0], 0, bias == Bias::Some ? 1 : -1); };
  c.reference = [=](const std::vector<Doubles>& a, const std::vector<Doubles>& p) {
    const std::size_t n = static_cast<std::size_t>(x.rows()), o = static_cast<std::size_t>(out),
                      k = static_cast<std::size_t>(in);
    Doubles y(n * o);
    for (std::size_t r = 0; r < n; ++r)
      for (std::size_t j = 0; j < o; ++j) {
        y[r * o + j] = bias == Bias::Some ? p[1][j] : 0;
        for (std::size_t i = 0; i < k; ++i) y[r * o + j] += a[0][r * k + i] * p[0][j * k + i];
      }
    return y;
  };
  return c;
}

OpCase many_outputs() {
  OpCase c = linear_case("many_outputs", {2, 75, 24}, 140, Bias::Some);
  c.splits_products = true;
  return c;
}

INSTANTIATE_TEST_SUITE_P(Linear, OpCases,
                         ::testing::Values(linear_case("with_bias", {2, 5, 7}, 11, Bias::Some),
                                           linear_case("without_bias", {3, 4, 16}, 8, Bias::None),
                                           linear_case("one_row", {1, 33}, 5, Bias::Some),
                                           linear_case("many_rows", {2, 37, 24}, 40, Bias::Some), many_outputs()),
                         case_name);

TEST(Linear, says_both_sides_of_a_mismatch) {
  OpCase c = linear_case("", {2, 3, 8}, 4, Bias::Some);
  c.params[0] = {4, 6};
  expect_case_error(c, {"linear", "weight is [4, 6]", "x is [2, 3, 8] with C = 8"});
  c = linear_case("", {2, 3, 8}, 4, Bias::Some);
  c.params[1] = {5};
  expect_case_error(c, {"bias is [5]", "weight is [4, 8] with O = 4"});
}

std::int64_t bytes_kept(bool trainable) {
  CpuDevice device;
  class Source final : public ParamSource {
   public:
    explicit Source(bool t) : table_{{.name = "w", .shape = {4, 8}, .trainable = t}} {}
    const std::vector<ParamInfo>& table() const override { return table_; }
    const void* data(int) override { return values_.data(); }
    DType dtype() const override { return DType::F32; }

   private:
    std::vector<ParamInfo> table_;
    std::vector<float> values_ = std::vector<float>(32, 1.0F);
  } source(trainable);
  const ParamView view(source);
  Tape tape(device, drop_all());
  regather::Run r{device, view, &tape};
  Tensor x(device.memory, {3, 8}, Tag::Activations);
  std::fill_n(x.fresh(), 24, 1.0F);
  Tensor input = tape.input(x, true);
  Tensor y = linear(r, input, 0);
  tape.outputs({y});
  std::int64_t bytes = 0;
  for (const auto& value : tape.report())
    if (value.saved) bytes += value.bytes;
  return bytes;
}

TEST(Linear, saves_its_input_only_for_a_trained_weight) {
  EXPECT_EQ(bytes_kept(true), 3 * 8 * 4);
  EXPECT_EQ(bytes_kept(false), 0);
}

}  // namespace
}  // namespace regather::testing
