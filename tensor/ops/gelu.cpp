// y = x (1 + tanh u) / 2 = x s, s = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3);  dx = dy (s + x s (1 - s) 2u').
// Saves x: everything else follows from it.
#include "tensor/ops/gelu.h"

#include "tensor/ops/checks.h"
#include "tensor/ops/kernels.h"
#include "tensor/ops/on_gpu.h"
#include "tensor/ops/parallel.h"

namespace regather {
namespace {

class Gelu final : public Op {
 public:
  std::string_view name() const override { return "gelu"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape> params) const override {
    check_counts(name(), in, 1, params, 0);
    check_real(name(), "x", in[0]);
    return {in[0]};
  }
  Saved saved(const Needs&) const override { return {.inputs = 1}; }
  bool cheap() const override { return true; }
  double flops(std::span<const ValueType> in, std::span<const Shape>) const override {
    return 20.0 * static_cast<double>(in[0].shape.numel());
  }
  void forward(const Call& call) const override {
    with_element(call.in[0].dtype(), [&]<class T>(Element<T>) {
      const T* x = call.in[0].data<T>();
      T* y = call.out[0].fresh<T>();
      const std::int64_t n = call.in[0].numel();
      if (on_gpu(call.device, [&](GpuOps& gpu) { gpu.on<T>().gelu(y, x, n); })) return;
      parallel_blocks(n, kElementGrain,
                      [&](auto begin, auto end) { kernels_on<T>().gelu(y + begin, x + begin, end - begin); });
    });
  }
  void backward(const BackwardCall& call) const override {
    if (!call.din[0]) return;
    with_element(call.in[0].dtype(), [&]<class T>(Element<T>) {
      const T *x = call.in[0].data<T>(), *dy = call.dout[0].data<T>();
      T* dx = call.din[0].fresh<T>();
      const std::int64_t n = call.dout[0].numel();
      if (on_gpu(call.device, [&](GpuOps& gpu) { gpu.on<T>().gelu_backward(dx, x, dy, n); })) return;
      parallel_blocks(n, kElementGrain, [&](auto begin, auto end) {
        kernels_on<T>().gelu_backward(dx + begin, x + begin, dy + begin, end - begin);
      });
    });
  }
};

}  // namespace

Tensor gelu(Run& run, Tensor x) { return run.apply(std::make_unique<Gelu>(), {std::move(x)})[0]; }

}  // namespace regather
