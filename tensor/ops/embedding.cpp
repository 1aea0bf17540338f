// x[b,t] = table[token[b,t]] + positions[t];  dtable[v] += sum of dx where the token is v, dpositions[t] += sum over b
// of dx. Saves the tokens, if the table is trained. The sums run in the order of (b, t), one thread a range of columns:
// no atomics, and the same bits for any number of threads.
#include "tensor/ops/embedding.h"

#include <algorithm>

#include "tensor/ops/checks.h"
#include "tensor/ops/kernels.h"
#include "tensor/ops/on_gpu.h"
#include "tensor/ops/parallel.h"

namespace regather {
namespace {

constexpr std::int64_t kRowGrain = 64, kColumnGrain = 256;

class Embedding final : public Op {
 public:
  Embedding(bool has_positions, DType elements) : has_positions_(has_positions), elements_(elements) {}
  std::string_view name() const override { return "embedding"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape> params) const override {
    check_counts(name(), in, 1, params, has_positions_ ? 2 : 1);
    check_dtype(name(), "tokens", in[0], DType::I32);
    const Shape &tokens = in[0].shape, &table = params[0];
    check(tokens.ndim() == 2, "embedding: tokens must be [B, T], is {}", tokens.to_string());
    check(table.ndim() == 2, "embedding: table must be [V, C], is {}", table.to_string());
    if (has_positions_)
      check(params[1].ndim() == 2 && params[1].dim(0) >= tokens.dim(1) && params[1].dim(1) == table.dim(1),
            "embedding: positions is {}, tokens is {} with T = {}, table is {} with C = {}", params[1].to_string(),
            tokens.to_string(), tokens.dim(1), table.to_string(), table.dim(1));
    return {{{tokens.dim(0), tokens.dim(1), table.dim(1)}, elements_}};
  }
  Saved saved(const Needs& needs) const override { return {.inputs = needs.params & 1U}; }
  double flops(std::span<const ValueType> in, std::span<const Shape> params) const override {
    return has_positions_ ? static_cast<double>(in[0].shape.numel() * params[0].dim(1)) : 0.0;
  }
  double bytes(Direction direction, std::span<const ValueType> in, std::span<const Shape> params,
               const Needs& needs) const override {  // a row a token, not the whole table
    const auto rows = static_cast<double>(in[0].shape.numel() * params[0].dim(1));
    const double positions = has_positions_ ? static_cast<double>(in[0].shape.dim(1) * params[0].dim(1)) : 0.0;
    const auto element = static_cast<double>(size_of(elements_)), gradient = static_cast<double>(sizeof(float));
    if (direction == Direction::Forward) return (2 * rows + positions) * element;
    const double added_to = (has(needs.params, 0) ? rows : 0) + (has(needs.params, 1) ? positions : 0);
    return rows * element + 2 * added_to * gradient;
  }

  void forward(const Call& call) const override {
    const Tensor& tokens = call.in[0];
    const std::int64_t batch = tokens.shape().dim(0), length = tokens.shape().dim(1), cols = call.out[0].shape().cols(),
                       vocab = call.param_shape(0).dim(0);
    const std::int32_t* token = tokens.data<std::int32_t>();
    if (call.device.gpu() == nullptr) check_tokens(token, tokens.shape(), vocab);  // a GPU checks them itself
    with_element(elements_, [&]<class T>(Element<T>) {
      const T *table = call.param<T>(0), *positions = has_positions_ ? call.param<T>(1) : nullptr;
      T* x = call.out[0].fresh<T>();
      const auto gpu_forward = [&](GpuOps& gpu) {
        gpu.on<T>().embedding(x, token, table, positions, batch, length, cols, vocab);
      };
      if (on_gpu(call.device, gpu_forward)) return;
      parallel_blocks(tokens.numel(), kRowGrain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const T* row = table + token[i] * cols;
          if (positions)
            kernels_on<T>().add(x + i * cols, row, positions + i % length * cols, cols);
          else
            std::copy_n(row, cols, x + i * cols);
        }
      });
    });
  }

  void backward(const BackwardCall& call) const override {
    const Tensor& dx = call.dout[0];
    const std::int64_t batch = dx.shape().dim(0), length = dx.shape().dim(1), cols = dx.shape().cols();
    float *dtable = call.dparam(0), *dpositions = has_positions_ ? call.dparam(1) : nullptr;
    const std::int32_t* token = dtable ? call.in[0].data<std::int32_t>() : nullptr;
    with_element(elements_, [&]<class T>(Element<T>) {
      const T* g = dx.data<T>();
      const auto gpu_backward = [&](GpuOps& gpu) {
        gpu.on<T>().embedding_backward(dtable, dpositions, token, g, batch, length, cols);
      };
      if (on_gpu(call.device, gpu_backward)) return;
      parallel_blocks(cols, kColumnGrain, [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t n = end - begin;
        for (std::int64_t i = 0; i < batch * length; ++i) {
          const auto add_to = [&](float* to) { kernels_on<T>().add_column_sums(to, g + i * cols + begin, 1, n, n); };
          if (dtable) add_to(dtable + token[i] * cols + begin);
          if (dpositions) add_to(dpositions + i % length * cols + begin);
        }
      });
    });
  }

 private:
  static void check_tokens(const std::int32_t* token, const Shape& shape, std::int64_t vocab) {
    for (std::int64_t i = 0; i < shape.numel(); ++i)
      if (token[i] < 0 || token[i] >= vocab)
        throw Error(fmt::format("embedding: token {} at sequence {}, position {} is outside the vocabulary [0, {})",
                                token[i], i / shape.dim(1), i % shape.dim(1), vocab));
  }

  bool has_positions_;
  DType elements_;  // of the parameters, and so of what is looked up
};

}  // namespace

Tensor embedding(Run& run, Tensor tokens, int table, int positions) {
  std::vector<int> params = {table};
  if (positions >= 0) params.push_back(positions);
  auto op = std::make_unique<Embedding>(positions >= 0, run.params.dtype(table));
  return run.apply(std::move(op), {std::move(tokens)}, std::move(params))[0];
}

}  // namespace regather
