// y = a + b;  da = db = dy: the gradient is passed on, neither computed nor copied. Saves nothing.
#include "tensor/ops/add.h"

#include "tensor/ops/checks.h"
#include "tensor/ops/kernels.h"
#include "tensor/ops/on_gpu.h"
#include "tensor/ops/parallel.h"

namespace regather {
namespace {

class Add final : public Op {
 public:
  std::string_view name() const override { return "add"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape> params) const override {
    check_counts(name(), in, 2, params, 0);
    check_real(name(), "a", in[0]);
    check_same(name(), "a", in[0], "b", in[1]);
    return {in[0]};
  }
  Saved saved(const Needs&) const override { return {}; }
  double flops(std::span<const ValueType> in, std::span<const Shape>) const override {
    return static_cast<double>(in[0].shape.numel());
  }
  bool passes_gradient() const override { return true; }
  void forward(const Call& call) const override {
    with_element(call.in[0].dtype(), [&]<class T>(Element<T>) {
      const T *a = call.in[0].data<T>(), *b = call.in[1].data<T>();
      T* y = call.out[0].fresh<T>();
      const std::int64_t n = call.in[0].numel();
      if (on_gpu(call.device, [&](GpuOps& gpu) { gpu.on<T>().add(y, a, b, n); })) return;
      parallel_blocks(n, kElementGrain,
                      [&](auto begin, auto end) { kernels_on<T>().add(y + begin, a + begin, b + begin, end - begin); });
    });
  }
  void backward(const BackwardCall&) const override {}
};

}  // namespace

Tensor add(Run& run, Tensor a, Tensor b) { return run.apply(std::make_unique<Add>(), {std::move(a), std::move(b)})[0]; }

}  // namespace regather
