// y = (x - mean) rstd gain + bias, rstd = 1 / sqrt(variance + eps). With h = (x - mean) rstd and e = dy gain:
// dx = rstd (e - mean(e) - h mean(e h)), dgain += sum of dy h, dbias += sum of dy.
// Saves x; mean and rstd are recomputed from it, which costs less than reading them would save.
#include "tensor/ops/layer_norm.h"

#include "tensor/ops/checks.h"
#include "tensor/ops/on_gpu.h"
#include "tensor/ops/row_chunks.h"

namespace regather {
namespace {

constexpr float kEps = 1e-5F;

class LayerNorm final : public Op {
 public:
  std::string_view name() const override { return "layer_norm"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape> params) const override {
    check_counts(name(), in, 1, params, 2);
    check_real(name(), "x", in[0]);
    check_channels(name(), "gain", params[0], in[0].shape);
    check_channels(name(), "bias", params[1], in[0].shape);
    return {in[0]};
  }
  Saved saved(const Needs& needs) const override {  // dbias alone needs no x
    return {.inputs = (needs.inputs & 1U) | (needs.params & 1U)};
  }
  bool cheap() const override { return true; }
  std::int64_t workspace(DeviceKind device, Direction direction, std::span<const ValueType> in,
                         std::span<const Shape>) const override {
    if (device == DeviceKind::Cuda) return 0;
    return direction == Direction::Forward ? 0 : RowChunks(in[0].shape.rows()).bytes(2 * in[0].shape.cols());
  }
  double flops(std::span<const ValueType> in, std::span<const Shape>) const override {
    return 8.0 * static_cast<double>(in[0].shape.numel());
  }

  void forward(const Call& call) const override {
    const Tensor& x = call.in[0];
    const std::int64_t rows = x.shape().rows(), cols = x.shape().cols();
    with_element(x.dtype(), [&]<class T>(Element<T>) {
      const T *gain = call.param<T>(0), *bias = call.param<T>(1), *from = x.data<T>();
      T* y = call.out[0].fresh<T>();
      if (on_gpu(call.device, [&](GpuOps& gpu) { gpu.on<T>().layer_norm(y, from, gain, bias, rows, cols, kEps); }))
        return;
      parallel_blocks(rows, RowChunks::kRows, [&](auto begin, auto end) {
        kernels_on<T>().layer_norm(y + begin * cols, from + begin * cols, gain, bias, end - begin, cols, kEps);
      });
    });
  }

  void backward(const BackwardCall& call) const override {
    const Tensor& dy = call.dout[0];
    const std::int64_t rows = dy.shape().rows(), cols = dy.shape().cols();
    float *dgain = call.dparam(0), *dbias = call.dparam(1);
    with_element(dy.dtype(), [&]<class T>(Element<T>) {
      T* dx = call.din[0] ? call.din[0].fresh<T>() : nullptr;
      const bool reads_x = dx || dgain;
      const T *x = reads_x ? call.in[0].data<T>() : nullptr, *gain = call.param<T>(0), *g = dy.data<T>();
      const auto gpu_backward = [&](GpuOps& gpu) {
        gpu.on<T>().layer_norm_backward(dx, dgain, dbias, x, gain, g, rows, cols, kEps);
      };
      if (on_gpu(call.device, gpu_backward)) return;
      const RowChunks chunks(rows);
      chunks.add_up(call.workspace, 2 * cols, [&](auto begin, auto end, float* partial) {
        kernels_on<T>().layer_norm_backward(dx ? dx + begin * cols : nullptr, dgain ? partial : nullptr,
                                            dbias ? partial + cols : nullptr, x + begin * cols, gain, g + begin * cols,
                                            end - begin, cols, kEps);
      });
      if (dgain) chunks.add_to(dgain, call.workspace, 0, cols, 2 * cols);
      if (dbias) chunks.add_to(dbias, call.workspace, cols, cols, 2 * cols);
    });
  }
};

}  // namespace

Tensor layer_norm(Run& run, Tensor x, int gain, int bias) {
  return run.apply(std::make_unique<LayerNorm>(), {std::move(x)}, {gain, bias})[0];
}

}  // namespace regather
