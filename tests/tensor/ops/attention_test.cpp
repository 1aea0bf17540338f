#include "tensor/ops/attention.h"

#include <cmath>

#include "tensor/ops/dropout.h"
#include "tests/tensor/ops/op_case.h"

namespace regather::testing {
namespace {

struct Sizes {
  std::int64_t batch, tokens, heads, kv_heads, size;
  float dropout = 0;
};

// every: only each every-th row and the last one; the others stay 0.
Doubles plain_attention(const Doubles& qkv, const Sizes& n, std::int64_t every = 1) {
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  const std::int64_t cols = (n.heads + 2 * n.kv_heads) * n.size;
  Doubles y(at(n.batch * n.tokens * n.heads * n.size));
  for (std::int64_t b = 0; b < n.batch; ++b)
    for (std::int64_t h = 0; h < n.heads; ++h)
      for (std::int64_t t = 0; t < n.tokens; ++t) {
        if (t % every != 0 && t + 1 != n.tokens) continue;
        const std::int64_t kv = h / (n.heads / n.kv_heads);
        const auto row = [&](std::int64_t token, std::int64_t head) {
          return &qkv[at((b * n.tokens + token) * cols + head * n.size)];
        };
        Doubles p(at(t + 1));
        double total = 0;
        for (std::int64_t s = 0; s <= t; ++s) {
          double score = 0;
          for (std::int64_t d = 0; d < n.size; ++d) score += row(t, h)[d] * row(s, n.heads + kv)[d];
          total += p[at(s)] = std::exp(score / std::sqrt(static_cast<double>(n.size)));
        }
        for (std::int64_t s = 0; s <= t; ++s) {
          const std::uint64_t e = static_cast<std::uint64_t>((h * n.tokens + t) * n.tokens + s);
          double w = p[at(s)] / total;
          if (n.dropout > 0) {
            const bool keep =
                kTestKey.quad(static_cast<std::uint64_t>(b), e / 4)[e % 4] >= dropout_threshold(n.dropout);
            w = keep ? w / (1 - static_cast<double>(n.dropout)) : 0;
          }
          for (std::int64_t d = 0; d < n.size; ++d)
            y[at(((b * n.tokens + t) * n.heads + h) * n.size + d)] += w * row(s, n.heads + n.kv_heads + kv)[d];
        }
      }
  return y;
}

OpCase attention_case(std::string name, Sizes n) {
  OpCase c{.name = std::move(name),
           .inputs = {{{n.batch, n.tokens, (n.heads + 2 * n.kv_heads) * n.size}}},
           .params = {},
           .gradient_roundings = 2};  // backward reads the output
  c.coordinates = n.tokens < 50 ? 60 : 15;
  c.apply = [n](Run& run, const Activations& a) { return attention(run, a[0], n.heads, n.kv_heads, n.dropout); };
  c.reference = [n](const std::vector<Doubles>& a, const std::vector<Doubles>&) { return plain_attention(a[0], n); };
  return c;
}

// Tiles are 96 x 96 tokens: lengths on both sides of that, and of the blocks inside.
INSTANTIATE_TEST_SUITE_P(
    Attention, OpCases,
    ::testing::Values(
        attention_case("one_token", {2, 1, 2, 2, 8}), attention_case("short", {2, 7, 2, 2, 16}),
        attention_case("odd_head", {1, 33, 3, 3, 10}), attention_case("one_tile", {1, 96, 1, 1, 32}),
        attention_case("three_tiles", {1, 200, 2, 2, 16}), attention_case("wide_head", {1, 100, 1, 1, 80}),
        attention_case("grouped", {2, 98, 4, 2, 8}), attention_case("one_kv_head", {1, 40, 6, 1, 16}),
        attention_case("dropout", {2, 13, 2, 1, 8, 0.3F}), attention_case("dropout_tiles", {2, 107, 2, 2, 8, 0.2F}),
        attention_case("usual_head", {1, 70, 2, 1, 64, 0.1F}), attention_case("widest_head", {1, 37, 1, 1, 200})),
    case_name);

TEST(Attention, says_both_sides_of_a_mismatch) {
  OpCase c = attention_case("", {1, 4, 2, 2, 8});
  c.inputs[0].shape = {1, 4, 47};
  expect_case_error(c, {"attention", "qkv is [1, 4, 47]", "2 heads + 2 x 2 key/value heads = 6"});
  c = attention_case("", {1, 4, 3, 2, 8});
  expect_case_error(c, {"3 heads cannot share 2 key/value heads"});
}

TEST(Attention, uses_memory_in_proportion_to_the_length) {
  const auto workspace = [](std::int64_t tokens) {
    return run(attention_case("", {1, tokens, 1, 1, 64})).peak_workspace;
  };
  const std::int64_t two = workspace(2048), four = workspace(4096);
  EXPECT_LT(four, 4096LL * 4096 * 4 / 4);
  EXPECT_LT(four, two * 2);
}

TEST(Attention, is_right_at_4096_tokens) {
  const Sizes n = {1, 4096, 1, 1, 64};
  const OpCase c = attention_case("", n);
  const Result result = run(c);
  const Doubles in = values_of_inputs(c)[0];
  const Doubles expected = plain_attention(in, n, 61);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] == 0) continue;
    ASSERT_NEAR(result.y[i], expected[i], 2e-5) << i;
  }
  for (float g : result.din[0]) ASSERT_TRUE(std::isfinite(g));
}

TEST(Attention, does_not_overflow_on_large_scores) {
  OpCase c = attention_case("", {1, 20, 1, 1, 8});
  CpuDevice device;
  const ParamView none;
  Tensor qkv(device.memory, c.inputs[0].shape, Tag::Activations);
  const Doubles values = values_of_inputs(c)[0];
  for (std::size_t i = 0; i < values.size(); ++i) qkv.fresh()[i] = static_cast<float>(values[i] * 30);
  regather::Run r{device, none};
  const Tensor y = attention(r, qkv, 1, 1);
  for (std::int64_t i = 0; i < y.numel(); ++i) ASSERT_TRUE(std::isfinite(y.data()[i]));
}

}  // namespace
}  // namespace regather::testing
