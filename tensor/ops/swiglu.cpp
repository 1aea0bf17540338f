// y = g s up, s = sigmoid(g), g = gate;  dgate = dy up s (1 + g (1 - s)), dup = dy g s.
// Saves both inputs: each gradient needs gate; the gate's needs up as well, so up is saved only for that.
#include "tensor/ops/swiglu.h"

#include "tensor/ops/checks.h"
#include "tensor/ops/kernels.h"
#include "tensor/ops/on_gpu.h"
#include "tensor/ops/parallel.h"

namespace regather {
namespace {

class SwiGlu final : public Op {
 public:
  std::string_view name() const override { return "swiglu"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape> params) const override {
    check_counts(name(), in, 2, params, 0);
    check_real(name(), "gate", in[0]);
    check_same(name(), "gate", in[0], "up", in[1]);
    return {in[0]};
  }
  Saved saved(const Needs& needs) const override { return {.inputs = has(needs.inputs, 0) ? 3U : 1U}; }
  bool cheap() const override { return true; }
  double flops(std::span<const ValueType> in, std::span<const Shape>) const override {
    return 16.0 * static_cast<double>(in[0].shape.numel());
  }
  void forward(const Call& call) const override {
    with_element(call.in[0].dtype(), [&]<class T>(Element<T>) {
      const T *gate = call.in[0].data<T>(), *up = call.in[1].data<T>();
      T* y = call.out[0].fresh<T>();
      const std::int64_t n = call.in[0].numel();
      if (on_gpu(call.device, [&](GpuOps& gpu) { gpu.on<T>().swiglu(y, gate, up, n); })) return;
      parallel_blocks(n, kElementGrain, [&](auto begin, auto end) {
        kernels_on<T>().swiglu(y + begin, gate + begin, up + begin, end - begin);
      });
    });
  }
  void backward(const BackwardCall& call) const override {
    with_element(call.dout[0].dtype(), [&]<class T>(Element<T>) {
      T* dgate = call.din[0] ? call.din[0].fresh<T>() : nullptr;
      T* dup = call.din[1] ? call.din[1].fresh<T>() : nullptr;
      if (!dgate && !dup) return;
      const T *gate = call.in[0].data<T>(), *up = dgate ? call.in[1].data<T>() : gate, *dy = call.dout[0].data<T>();
      const std::int64_t n = call.dout[0].numel();
      if (on_gpu(call.device, [&](GpuOps& gpu) { gpu.on<T>().swiglu_backward(dgate, dup, gate, up, dy, n); })) return;
      parallel_blocks(n, kElementGrain, [&](auto begin, auto end) {
        kernels_on<T>().swiglu_backward(dgate ? dgate + begin : nullptr, dup ? dup + begin : nullptr, gate + begin,
                                        up + begin, dy + begin, end - begin);
      });
    });
  }
};

}  // namespace

Tensor swiglu(Run& run, Tensor gate, Tensor up) {
  return run.apply(std::make_unique<SwiGlu>(), {std::move(gate), std::move(up)})[0];
}

}  // namespace regather
