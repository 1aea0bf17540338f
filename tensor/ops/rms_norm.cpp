// y = x r gain, r = 1 / sqrt(mean(x^2) + eps). With h = x r and e = dy gain: dx = r (e - h mean(e h)), dgain += sum of
// dy h. Saves x; r is recomputed from it.
#include "tensor/ops/rms_norm.h"

#include "tensor/ops/checks.h"
#include "tensor/ops/on_gpu.h"
#include "tensor/ops/row_chunks.h"

namespace regather {
namespace {

constexpr float kEps = 1e-5F;

class RmsNorm final : public Op {
 public:
  std::string_view name() const override { return "rms_norm"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape> params) const override {
    check_counts(name(), in, 1, params, 1);
    check_real(name(), "x", in[0]);
    check_channels(name(), "gain", params[0], in[0].shape);
    return {in[0]};
  }
  Saved saved(const Needs&) const override { return {.inputs = 1}; }
  bool cheap() const override { return true; }
  std::int64_t workspace(DeviceKind device, Direction direction, std::span<const ValueType> in,
                         std::span<const Shape>) const override {
    if (device == DeviceKind::Cuda) return 0;
    return direction == Direction::Forward ? 0 : RowChunks(in[0].shape.rows()).bytes(in[0].shape.cols());
  }
  double flops(std::span<const ValueType> in, std::span<const Shape>) const override {
    return 5.0 * static_cast<double>(in[0].shape.numel());
  }

  void forward(const Call& call) const override {
    const Tensor& x = call.in[0];
    const std::int64_t rows = x.shape().rows(), cols = x.shape().cols();
    with_element(x.dtype(), [&]<class T>(Element<T>) {
      const T *gain = call.param<T>(0), *from = x.data<T>();
      T* y = call.out[0].fresh<T>();
      if (on_gpu(call.device, [&](GpuOps& gpu) { gpu.on<T>().rms_norm(y, from, gain, rows, cols, kEps); })) return;
      parallel_blocks(rows, RowChunks::kRows, [&](auto begin, auto end) {
        kernels_on<T>().rms_norm(y + begin * cols, from + begin * cols, gain, end - begin, cols, kEps);
      });
    });
  }

  void backward(const BackwardCall& call) const override {
    const Tensor& dy = call.dout[0];
    const std::int64_t rows = dy.shape().rows(), cols = dy.shape().cols();
    float* dgain = call.dparam(0);
    with_element(dy.dtype(), [&]<class T>(Element<T>) {
      T* dx = call.din[0] ? call.din[0].fresh<T>() : nullptr;
      const T *x = call.in[0].data<T>(), *gain = call.param<T>(0), *g = dy.data<T>();
      if (on_gpu(call.device,
                 [&](GpuOps& gpu) { gpu.on<T>().rms_norm_backward(dx, dgain, x, gain, g, rows, cols, kEps); }))
        return;
      const RowChunks chunks(rows);
      chunks.add_up(call.workspace, cols, [&](auto begin, auto end, float* partial) {
        kernels_on<T>().rms_norm_backward(dx ? dx + begin * cols : nullptr, dgain ? partial : nullptr, x + begin * cols,
                                          gain, g + begin * cols, end - begin, cols, kEps);
      });
      if (dgain) chunks.add_to(dgain, call.workspace, 0, cols, cols);
    });
  }
};

}  // namespace

Tensor rms_norm(Run& run, Tensor x, int gain) {
  return run.apply(std::make_unique<RmsNorm>(), {std::move(x)}, {gain})[0];
}

}  // namespace regather
