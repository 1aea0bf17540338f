#include "tensor/ops/embedding.h"

#include "tests/tensor/ops/op_case.h"

namespace regather::testing {
namespace {

constexpr int kVocab = 9;
enum class Positions { None, Some };

OpCase embedding_case(std::string name, std::int64_t batch, std::int64_t tokens, std::int64_t cols,
                      Positions positions) {
  OpCase c{.name = std::move(name), .inputs = {{{batch, tokens}, DType::I32, 0, kVocab}}, .params = {{kVocab, cols}}};
  if (positions == Positions::Some) c.params.push_back({tokens + 2, cols});
  c.apply = [positions](Run& run, const Activations& a) {
    return embedding(run, a[0], 0, positions == Positions::Some ? 1 : -1);
  };
  c.reference = [=](const std::vector<Doubles>& a, const std::vector<Doubles>& p) {
    const std::size_t n = static_cast<std::size_t>(cols);
    Doubles x;
    for (std::size_t i = 0; i < a[0].size(); ++i)
      for (std::size_t k = 0; k < n; ++k) {
        x.push_back(p[0][static_cast<std::size_t>(a[0][i]) * n + k]);
        if (positions == Positions::Some) x.back() += p[1][i % static_cast<std::size_t>(tokens) * n + k];
      }
    return x;
  };
  return c;
}

INSTANTIATE_TEST_SUITE_P(Embedding, OpCases,
                         ::testing::Values(embedding_case("with_positions", 3, 7, 13, Positions::Some),
                                           embedding_case("without_positions", 2, 70, 520, Positions::None)),
                         case_name);

TEST(Embedding, names_a_token_outside_the_vocabulary) {
  for (int bad : {-1, kVocab}) {
    OpCase c = embedding_case("", 2, 3, 4, Positions::Some);
    c.inputs[0].low = bad;
    c.inputs[0].high = bad + 1;
    expect_case_error(c, {"embedding", "token " + std::to_string(bad), "sequence 0, position 0", "[0, 9)"});
  }
}

TEST(Embedding, says_both_sides_of_a_mismatch) {
  OpCase c = embedding_case("", 2, 5, 4, Positions::Some);
  c.params[1] = {3, 4};
  expect_case_error(c, {"positions is [3, 4]", "tokens is [2, 5] with T = 5"});
}

}  // namespace
}  // namespace regather::testing
