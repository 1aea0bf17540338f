// logits = x w^T, loss[n] = log(sum of e^logits[n]) - logits[n, target[n]];
// dlogits = dloss[n] (softmax - one_hot(target)), dx = dlogits w, dw += dlogits^T x.
// Training does all of it in backward(), chunk by chunk: three products; a forward pass that threw its logits away
// would make it four. Saves x, targets and the losses, which backward() fills.
#include "tensor/ops/linear_cross_entropy.h"

#include <algorithm>

#include "tensor/ops/checks.h"
#include "tensor/ops/gemm.h"
#include "tensor/ops/gpu_ops.h"
#include "tensor/ops/kernels.h"
#include "tensor/ops/parallel.h"

namespace regather {
namespace {

constexpr std::int64_t kChunkBytes = std::int64_t{64} << 20;

class LinearCrossEntropy final : public Op {
 public:
  std::string_view name() const override { return "linear_cross_entropy"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape> params) const override {
    check_counts(name(), in, 2, params, 1);
    check_fp32(name(), "x", in[0]);
    check_dtype(name(), "targets", in[1], DType::I32);
    const Shape &x = in[0].shape, &targets = in[1].shape, &w = params[0];
    check(x.ndim() == 3 && targets == Shape{x.dim(0), x.dim(1)},
          "linear_cross_entropy: x is {}, targets is {}; they must be [B, T, C] and [B, T]", x.to_string(),
          targets.to_string());
    check(w.ndim() == 2 && w.dim(1) == x.cols() && w.dim(0) > 0,
          "linear_cross_entropy: weight is {}, x is {} with C = {}", w.to_string(), x.to_string(), x.cols());
    return {{targets}};
  }
  bool fused_with_backward() const override { return true; }
  Saved saved(const Needs&) const override { return {.inputs = 3, .outputs = 1}; }
  std::int64_t workspace(Direction, std::span<const ValueType> in, std::span<const Shape> params) const override {
    const std::int64_t vocab = params[0].dim(0);
    return cross_entropy_chunk(in[0].shape.rows(), vocab) * vocab * 4;
  }
  double flops(std::span<const ValueType> in, std::span<const Shape> params) const override {
    return 2.0 * static_cast<double>(in[0].shape.numel()) * static_cast<double>(params[0].dim(0));
  }
  double backward_flops(std::span<const ValueType> in, std::span<const Shape> params,
                        const Needs& needs) const override {  // products for the logits, dx and dw
    return flops(in, params) * (1 + (has(needs.inputs, 0) ? 1 : 0) + (has(needs.params, 0) ? 1 : 0));
  }

  void forward(const Call& call) const override {
    for_each_chunk(call, [&](const Chunk& c, float* losses) {
      if (GpuOps* gpu = call.device.gpu())
        return gpu->token_losses(losses, c.logits, c.targets, nullptr, c.rows, c.vocab);
      each_row(c, [&](std::int64_t r) {
        losses[r] = c.targets[r] < 0 ? 0.0F : kernels().token_loss(c.logits + r * c.vocab, c.vocab, c.targets[r]);
      });
    });
  }

  void backward(const BackwardCall& call) const override {
    const float *weight = call.param(0), *dloss = call.dout[0].data();
    float *dx = call.din[0] ? call.din[0].fresh() : nullptr, *dweight = call.dparam(0);
    for_each_chunk(call, [&](const Chunk& c, float* losses) {
      if (GpuOps* gpu = call.device.gpu()) {
        gpu->token_losses(losses, c.logits, c.targets, dloss + c.first, c.rows, c.vocab);
        if (dx) gpu->gemm_nn(c.rows, c.cols, c.vocab, c.logits, weight, dx + c.first * c.cols, Into::Write);
        if (dweight) gpu->gemm_tn(c.vocab, c.cols, c.rows, c.logits, c.x, dweight, Into::Add);
        return;
      }
      each_row(c, [&](std::int64_t r) {
        float* row = c.logits + r * c.vocab;
        if (c.targets[r] >= 0) {
          losses[r] = kernels().token_loss_gradient(row, c.vocab, c.targets[r], dloss[c.first + r]);
        } else {
          losses[r] = 0;
          std::fill_n(row, c.vocab, 0.0F);
        }
      });
      if (dx) gemm_nn(c.rows, c.cols, c.vocab, c.logits, weight, dx + c.first * c.cols, Into::Write);
      if (dweight) gemm_tn(c.vocab, c.cols, c.rows, c.logits, c.x, dweight, Into::Add);
    });
  }

 private:
  struct Chunk {
    std::int64_t first, rows, cols, vocab;
    const float* x;
    const std::int32_t* targets;
    float* logits;
  };

  // f(chunk with its logits, where its losses go).
  template <class F>
  static void for_each_chunk(const Call& call, F f) {
    const Tensor &x = call.in[0], &targets = call.in[1];
    const std::int64_t rows = x.shape().rows(), cols = x.shape().cols(), vocab = call.param_shape(0).dim(0);
    GpuOps* gpu = call.device.gpu();
    if (!gpu) check_targets(targets, vocab);
    const float* weight = call.param(0);
    float* losses = call.out[0].fresh();
    const std::int64_t size = cross_entropy_chunk(rows, vocab);
    for (std::int64_t first = 0; first < rows; first += size) {
      const Chunk c = {.first = first,
                       .rows = std::min(size, rows - first),
                       .cols = cols,
                       .vocab = vocab,
                       .x = x.data() + first * cols,
                       .targets = targets.data<std::int32_t>() + first,
                       .logits = call.workspace};
      if (gpu)
        gpu->gemm_nt(c.rows, vocab, cols, c.x, weight, c.logits, Into::Write);
      else
        gemm_nt(c.rows, vocab, cols, c.x, weight, c.logits, Into::Write);
      f(c, losses + first);
    }
  }
  template <class F>
  static void each_row(const Chunk& c, F f) {
    parallel_blocks(c.rows, 8, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) f(r);
    });
  }
  static void check_targets(const Tensor& targets, std::int64_t vocab) {
    const std::int32_t* t = targets.data<std::int32_t>();
    for (std::int64_t i = 0; i < targets.numel(); ++i)
      if (t[i] < -1 || t[i] >= vocab)
        throw Error(fmt::format(
            "linear_cross_entropy: target {} at sequence {}, position {} is neither -1 nor in the vocabulary [0, {})",
            t[i], i / targets.shape().dim(1), i % targets.shape().dim(1), vocab));
  }
};

}  // namespace

std::int64_t cross_entropy_chunk(std::int64_t rows, std::int64_t vocab) {
  if (rows <= 1) return rows;
  const std::int64_t fit = std::max<std::int64_t>(1, kChunkBytes / (4 * vocab));
  const std::int64_t chunks = std::max<std::int64_t>(2, (rows + fit - 1) / fit);
  return (rows + chunks - 1) / chunks;  // chunks of one size, but for the last
}

Tensor linear_cross_entropy(Run& run, Tensor x, Tensor targets, int weight) {
  return run.apply(std::make_unique<LinearCrossEntropy>(), {std::move(x), std::move(targets)}, {weight})[0];
}

}  // namespace regather
