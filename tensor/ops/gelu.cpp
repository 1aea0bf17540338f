// y = x (1 + tanh u) / 2 = x s, s = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3);  dx = dy (s + x s (1 - s) 2u').
// Saves x: everything else follows from it.
#include "tensor/ops/gelu.h"

#include "tensor/ops/checks.h"
#include "tensor/ops/gpu_ops.h"
#include "tensor/ops/kernels.h"
#include "tensor/ops/parallel.h"

namespace regather {
namespace {

class Gelu final : public Op {
 public:
  std::string_view name() const override { return "gelu"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape> params) const override {
    check_counts(name(), in, 1, params, 0);
    check_fp32(name(), "x", in[0]);
    return {in[0]};
  }
  Saved saved(const Needs&) const override { return {.inputs = 1}; }
  double flops(std::span<const ValueType> in, std::span<const Shape>) const override {
    return 20.0 * static_cast<double>(in[0].shape.numel());
  }
  void forward(const Call& call) const override {
    const float* x = call.in[0].data();
    float* y = call.out[0].fresh();
    if (GpuOps* gpu = call.device.gpu()) return gpu->gelu(y, x, call.in[0].numel());
    parallel_blocks(call.in[0].numel(), kElementGrain,
                    [&](auto begin, auto end) { kernels().gelu(y + begin, x + begin, end - begin); });
  }
  void backward(const BackwardCall& call) const override {
    if (!call.din[0]) return;
    const float *x = call.in[0].data(), *dy = call.dout[0].data();
    float* dx = call.din[0].fresh();
    if (GpuOps* gpu = call.device.gpu()) return gpu->gelu_backward(dx, x, dy, call.dout[0].numel());
    parallel_blocks(call.dout[0].numel(), kElementGrain, [&](auto begin, auto end) {
      kernels().gelu_backward(dx + begin, x + begin, dy + begin, end - begin);
    });
  }
};

}  // namespace

Tensor gelu(Run& run, Tensor x) { return run.apply(std::make_unique<Gelu>(), {std::move(x)})[0]; }

}  // namespace regather
