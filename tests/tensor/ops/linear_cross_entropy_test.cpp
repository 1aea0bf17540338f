#include "tensor/ops/linear_cross_entropy.h"

#include <cmath>

#include "tests/tensor/ops/op_case.h"

namespace regather::testing {
namespace {

OpCase loss_case(std::string name, std::int64_t batch, std::int64_t tokens, std::int64_t cols, int vocab, int low = 0) {
  return {.name = std::move(name),
          .inputs = {{{batch, tokens, cols}}, {{batch, tokens}, DType::I32, low, vocab}},
          .params = {{vocab, cols}},
          .apply = [](Run& run, const Activations& a) { return linear_cross_entropy(run, a[0], a[1], 0); },
          .reference =
              [=](const std::vector<Doubles>& a, const std::vector<Doubles>& p) {
                const std::size_t n = static_cast<std::size_t>(cols), v = static_cast<std::size_t>(vocab);
                Doubles losses;
                for (std::size_t i = 0; i < a[1].size(); ++i) {
                  double total = 0, chosen = 0;
                  for (std::size_t j = 0; j < v; ++j) {
                    double logit = 0;
                    for (std::size_t k = 0; k < n; ++k) logit += a[0][i * n + k] * p[0][j * n + k];
                    total += std::exp(logit);
                    if (static_cast<double>(j) == a[1][i]) chosen = logit;
                  }
                  losses.push_back(a[1][i] < 0 ? 0 : std::log(total) - chosen);
                }
                return losses;
              },
          .splits_products = vocab > 4096};
}

INSTANTIATE_TEST_SUITE_P(LinearCrossEntropy, OpCases,
                         ::testing::Values(loss_case("small", 2, 5, 8, 7), loss_case("ignored_targets", 2, 9, 8, 3, -1),
                                           loss_case("one_row", 1, 1, 16, 33), loss_case("wide", 1, 6, 12, 4099)),
                         case_name);

TEST(LinearCrossEntropy, evaluation_gives_the_losses_of_training) {
  const OpCase c = loss_case("", 2, 50, 16, 101, -1);
  EXPECT_EQ(evaluate(c), run(c).y);
}

TEST(LinearCrossEntropy, never_holds_all_logits) {
  for (std::int64_t rows : {2, 3, 64, 1000, 8192})
    for (std::int64_t vocab : {2, 257, 50257, 1000000}) {
      const std::int64_t chunk = cross_entropy_chunk(DeviceKind::Cpu, {{1, rows, 8}}, vocab);
      EXPECT_LT(chunk, rows);
      EXPECT_GE(chunk, 1);
      EXPECT_TRUE(chunk * vocab * 4 <= 64 << 20 || chunk == 1);
    }
  const OpCase c = loss_case("", 1, 64, 8, 4000);
  EXPECT_LT(run(c).peak_workspace, 64 * 4000 * 4 * 6 / 10);
}

TEST(LinearCrossEntropy, takes_the_rows_that_a_gpus_arithmetic_wants) {
  constexpr std::int64_t kGiB = std::int64_t{1} << 30;
  for (const DType dtype : {DType::F32, DType::BF16})
    for (const std::int64_t cols : {768, 2048, 8192})
      for (const std::int64_t vocab : {256, 50304, 128256, 1000000})
        for (const std::int64_t rows : {1, 100, 8192, 100000}) {
          const std::int64_t chunk = cross_entropy_chunk(DeviceKind::Cuda, {{1, rows, cols}, dtype}, vocab);
          SCOPED_TRACE(fmt::format("{} rows, {} columns, {} tokens: {}", rows, cols, vocab, chunk));
          EXPECT_TRUE(chunk == rows || chunk % 128 == 0);
          EXPECT_LE(chunk * vocab * 4, kGiB);
          const auto r = static_cast<double>(chunk), c = static_cast<double>(cols),
                     e = static_cast<double>(size_of(dtype));
          const double flops_a_byte = r * c / (4 * c + e * r / 2);  // of dw += dlogits^T x, with a large vocabulary
          if (chunk < rows && (chunk + 128) * vocab * 4 <= kGiB) {
            EXPECT_TRUE(flops_a_byte > (dtype == DType::BF16 ? 250 : 18) || chunk == 2048) << flops_a_byte;
          }
        }
}

TEST(LinearCrossEntropy, does_not_overflow_on_large_logits) {
  OpCase c = loss_case("", 1, 4, 8, 40);
  c.params = {{40, 8}};
  CpuDevice device;
  class Large final : public ParamSource {
   public:
    const std::vector<ParamInfo>& table() const override { return table_; }
    const void* data(int) override { return values_.data(); }
    DType dtype() const override { return DType::F32; }

   private:
    std::vector<ParamInfo> table_{{.name = "w", .shape = {40, 8}}};
    std::vector<float> values_ = std::vector<float>(320, 1e4F);
  } source;
  const ParamView view(source);
  Tensor x(device.memory, {1, 4, 8}, Tag::Activations), targets(device.memory, {1, 4}, Tag::Activations, DType::I32);
  std::fill_n(x.fresh(), 32, 1.0F);
  std::fill_n(targets.fresh<std::int32_t>(), 4, 3);
  regather::Run r{device, view};
  const Tensor losses = linear_cross_entropy(r, x, targets, 0);
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(losses.data()[i], std::log(40.0), 1e-5);
}

TEST(LinearCrossEntropy, names_a_target_outside_the_vocabulary) {
  OpCase c = loss_case("", 1, 3, 4, 5);
  c.inputs[1].low = 5;
  c.inputs[1].high = 6;
  expect_case_error(c, {"linear_cross_entropy", "target 5", "position 0", "[0, 5)"});
}

TEST(LinearCrossEntropy, says_both_sides_of_a_mismatch) {
  OpCase c = loss_case("", 1, 3, 4, 5);
  c.params[0] = {5, 6};
  expect_case_error(c, {"weight is [5, 6]", "x is [1, 3, 4] with C = 4"});
  c = loss_case("", 1, 3, 4, 5);
  c.inputs[1].shape = {1, 2};
  expect_case_error(c, {"x is [1, 3, 4]", "targets is [1, 2]"});
}

}  // namespace
}  // namespace regather::testing
