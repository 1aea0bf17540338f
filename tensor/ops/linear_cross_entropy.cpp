// logits = x w^T, loss[n] = log(sum of e^logits[n]) - logits[n, target[n]];
// dlogits = dloss[n] (softmax - one_hot(target)), dx = dlogits w, dw += dlogits^T x.
// Logits and losses are fp32, whatever the type of x and w; so are dlogits, but for a GPU's products, which take
// factors of one type. Training does all of it in backward(), chunk by chunk:
// three products; a forward pass that threw its logits away would make it four. Saves x, targets and the losses, which
// backward() fills.
#include "tensor/ops/linear_cross_entropy.h"

#include <algorithm>

#include "tensor/ops/checks.h"
#include "tensor/ops/gemm.h"
#include "tensor/ops/kernels.h"
#include "tensor/ops/on_gpu.h"
#include "tensor/ops/parallel.h"

namespace regather {
namespace {

constexpr std::int64_t kChunkBytes = std::int64_t{64} << 20;
// Of a GPU: 1/80 of the 80 GiB of those that such vocabularies are trained on.
constexpr std::int64_t kGpuChunkBytes = std::int64_t{1} << 30;
constexpr std::int64_t kGpuRowsTile = 128;  // of the products; fewer than 4 of them leave multiprocessors idle in dx
constexpr std::int64_t kFewestGpuRows = 4 * kGpuRowsTile, kMostGpuRows = 16 * kGpuRowsTile;

// So many that dw += dlogits^T x, the product that moves most, is limited by arithmetic. With R rows and elements of e
// bytes it does 2 R V C flops, and moves 8 V C bytes of dw (fp32, read and written) and e R V of dlogits:
// R C / (4 C + e R / 2) flops a byte, of which an H100 can do 295 (bf16) or 20 (fp32), an A100 153 or 10.
std::int64_t gpu_rows(DType dtype, std::int64_t cols, std::int64_t vocab) {
  const std::int64_t flops_a_byte = dtype == DType::BF16 ? 295 : 20;
  const std::int64_t left = cols - flops_a_byte * static_cast<std::int64_t>(size_of(dtype)) / 2;
  const std::int64_t enough = left > 0 ? (4 * flops_a_byte * cols + left - 1) / left : kMostGpuRows;
  const std::int64_t rows = std::clamp(enough, kFewestGpuRows, kMostGpuRows);
  const std::int64_t tiles =
      std::min((rows + kGpuRowsTile - 1) / kGpuRowsTile, kGpuChunkBytes / (4 * vocab * kGpuRowsTile));
  return std::max<std::int64_t>(1, tiles) * kGpuRowsTile;
}

class LinearCrossEntropy final : public Op {
 public:
  std::string_view name() const override { return "linear_cross_entropy"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape> params) const override {
    check_counts(name(), in, 2, params, 1);
    check_real(name(), "x", in[0]);
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
  std::int64_t workspace(DeviceKind device, Direction, std::span<const ValueType> in,
                         std::span<const Shape> params) const override {
    const std::int64_t vocab = params[0].dim(0), cols = params[0].dim(1);
    const std::int64_t rows = cross_entropy_chunk(device, in[0], vocab);
    if (device == DeviceKind::Cuda) return rows * vocab * 4;
    return rows * vocab * 4 +
           std::max({gemm_scratch(in[0].dtype, rows, vocab, cols), gemm_scratch(in[0].dtype, rows, cols, vocab),
                     gemm_scratch(in[0].dtype, vocab, cols, rows)});
  }
  double flops(std::span<const ValueType> in, std::span<const Shape> params) const override {
    return 2.0 * static_cast<double>(in[0].shape.numel()) * static_cast<double>(params[0].dim(0));
  }
  double backward_flops(std::span<const ValueType> in, std::span<const Shape> params,
                        const Needs& needs) const override {  // products for the logits, dx and dw
    return flops(in, params) * (1 + (has(needs.inputs, 0) ? 1 : 0) + (has(needs.params, 0) ? 1 : 0));
  }

  void forward(const Call& call) const override {
    with_element(call.in[0].dtype(), [&]<class T>(Element<T>) {
      for_each_chunk<T>(call, [&](const Chunk<T>& c, float* losses) {
        const auto gpu_losses = [&](GpuOps& gpu) {
          gpu.on<T>().token_losses(losses, c.logits, c.targets, nullptr, c.rows, c.vocab);
        };
        if (on_gpu(call.device, gpu_losses)) return;
        each_row(c.rows, [&](std::int64_t r) {
          losses[r] = c.targets[r] < 0 ? 0.0F : kernels().token_loss(c.logits + r * c.vocab, c.vocab, c.targets[r]);
        });
      });
    });
  }

  void backward(const BackwardCall& call) const override {
    with_element(call.in[0].dtype(), [&]<class T>(Element<T>) {
      const T* weight = call.param<T>(0);
      const float* dloss = call.dout[0].data();
      T* dx = call.din[0] ? call.din[0].fresh<T>() : nullptr;
      float* dweight = call.dparam(0);
      for_each_chunk<T>(call, [&](const Chunk<T>& c, float* losses) {
        const auto gpu_backward = [&](GpuOps& gpu) {
          gpu.on<T>().token_losses(losses, c.logits, c.targets, dloss + c.first, c.rows, c.vocab);
          // Rows of what products take there: elements of x, in the room of the logits.
          const T* dlogits = reinterpret_cast<const T*>(c.logits);
          const RowStrides apart = {.a = c.vocab * static_cast<std::int64_t>(sizeof(float) / sizeof(T))};
          if (dx) gpu.gemm_nn(c.rows, c.cols, c.vocab, dlogits, weight, dx + c.first * c.cols, Into::Write, apart);
          if (dweight) gpu.gemm_tn(c.vocab, c.cols, c.rows, dlogits, c.x, dweight, Into::Add, apart);
        };
        if (on_gpu(call.device, gpu_backward)) return;
        each_row(c.rows, [&](std::int64_t r) {
          float* row = c.logits + r * c.vocab;
          if (c.targets[r] >= 0) {
            losses[r] = kernels().token_loss_gradient(row, c.vocab, c.targets[r], dloss[c.first + r]);
          } else {
            losses[r] = 0;
            std::fill_n(row, c.vocab, 0.0F);
          }
        });
        if (dx) gemm_nn(c.rows, c.cols, c.vocab, c.logits, weight, dx + c.first * c.cols, Into::Write, {}, c.scratch);
        if (dweight) gemm_tn(c.vocab, c.cols, c.rows, c.logits, c.x, dweight, Into::Add, {}, c.scratch);
      });
    });
  }

 private:
  template <class T>
  struct Chunk {
    std::int64_t first, rows, cols, vocab;
    const T* x;
    const std::int32_t* targets;
    float *logits, *scratch;  // scratch: of the products
  };

  // f(chunk with its logits, where its losses go).
  template <class T, class F>
  static void for_each_chunk(const Call& call, F f) {
    const Tensor &x = call.in[0], &targets = call.in[1];
    const std::int64_t rows = x.shape().rows(), cols = x.shape().cols(), vocab = call.param_shape(0).dim(0);
    if (call.device.gpu() == nullptr) check_targets(targets, vocab);  // a GPU checks them itself
    const T* weight = call.param<T>(0);
    float* losses = call.out[0].fresh();
    const std::int64_t size = cross_entropy_chunk(call.device.kind(), {x.shape(), x.dtype()}, vocab);
    for (std::int64_t first = 0; first < rows; first += size) {
      const Chunk<T> c = {.first = first,
                          .rows = std::min(size, rows - first),
                          .cols = cols,
                          .vocab = vocab,
                          .x = x.data<T>() + first * cols,
                          .targets = targets.data<std::int32_t>() + first,
                          .logits = call.workspace,
                          .scratch = call.workspace + size * vocab};
      if (!on_gpu(call.device,
                  [&](GpuOps& gpu) { gpu.gemm_nt(c.rows, vocab, cols, c.x, weight, c.logits, Into::Write); }))
        gemm_nt(c.rows, vocab, cols, c.x, weight, c.logits, Into::Write, {}, c.scratch);
      f(c, losses + first);
      if (first + size < rows) call.device.make_progress();
    }
  }
  template <class F>
  static void each_row(std::int64_t rows, F f) {
    parallel_blocks(rows, 8, [&](std::int64_t begin, std::int64_t end) {
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

std::int64_t cross_entropy_chunk(DeviceKind device, const ValueType& x, std::int64_t vocab) {
  const std::int64_t rows = x.shape.rows();
  if (rows <= 1) return rows;
  if (device == DeviceKind::Cuda) {
    const std::int64_t fit = gpu_rows(x.dtype, x.shape.cols(), vocab), chunks = (rows + fit - 1) / fit;
    const std::int64_t tiles = (rows + chunks * kGpuRowsTile - 1) / (chunks * kGpuRowsTile);
    return std::min(rows, tiles * kGpuRowsTile);
  }
  const std::int64_t fit = std::max<std::int64_t>(1, kChunkBytes / (4 * vocab));
  const std::int64_t chunks = std::max<std::int64_t>(2, (rows + fit - 1) / fit);
  return (rows + chunks - 1) / chunks;  // chunks of one size, but for the last
}

Tensor linear_cross_entropy(Run& run, Tensor x, Tensor targets, int weight) {
  return run.apply(std::make_unique<LinearCrossEntropy>(), {std::move(x), std::move(targets)}, {weight})[0];
}

}  // namespace regather
