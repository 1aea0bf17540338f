// y = x m / (1 - rate), m in {0, 1} from Philox;  dx = dy m / (1 - rate). Saves nothing: the key gives the same mask
// again.
#include "tensor/ops/dropout.h"

#include <cmath>

#include "tensor/ops/checks.h"
#include "tensor/ops/kernels.h"
#include "tensor/ops/on_gpu.h"
#include "tensor/ops/parallel.h"

namespace regather {
namespace {

class Dropout final : public Op {
 public:
  explicit Dropout(float rate) : threshold_(dropout_threshold(rate)), scale_(1.0F / (1.0F - rate)) {}
  std::string_view name() const override { return "dropout"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape> params) const override {
    check_counts(name(), in, 1, params, 0);
    check_real(name(), "x", in[0]);
    check(in[0].shape.ndim() == 3, "dropout: x must be [B, T, C], is {}", in[0].shape.to_string());
    return {in[0]};
  }
  Saved saved(const Needs&) const override { return {}; }
  double flops(std::span<const ValueType> in, std::span<const Shape>) const override {
    return static_cast<double>(in[0].shape.numel());
  }
  void forward(const Call& call) const override { apply(call, call.in[0], call.out[0]); }
  void backward(const BackwardCall& call) const override {
    if (call.din[0]) apply(call, call.dout[0], call.din[0]);
  }

 private:
  void apply(const Call& call, const Tensor& x, Tensor& y) const {
    const std::int64_t sequences = x.shape().dim(0), size = x.numel() / std::max<std::int64_t>(1, sequences);
    const auto key = call.key.words();
    with_element(x.dtype(), [&]<class T>(Element<T>) {
      const T* from = x.data<T>();
      T* to = y.fresh<T>();
      const RandomMask mask{.threshold = threshold_, .scale = scale_, .key = call.key};
      if (on_gpu(call.device, [&](GpuOps& gpu) { gpu.on<T>().dropout(to, from, sequences, size, mask); })) return;
      for (std::int64_t b = 0; b < sequences; ++b)
        parallel_blocks(size, kElementGrain, [&](std::int64_t begin, std::int64_t end) {
          const RandomRow row = {
              {key[0], key[1]}, call.key.sequence + static_cast<std::uint64_t>(b), static_cast<std::uint64_t>(begin)};
          kernels_on<T>().dropout(to + b * size + begin, from + b * size + begin, end - begin, row, threshold_, scale_);
        });
    });
  }

  std::uint32_t threshold_;
  float scale_;
};

}  // namespace

std::uint32_t dropout_threshold(float rate) {
  check(rate >= 0.0F && rate < 1.0F, "dropout: the rate must be in [0, 1), is {}", rate);
  return static_cast<std::uint32_t>(static_cast<double>(rate) * 4294967296.0);
}

Tensor dropout(Run& run, Tensor x, float rate) {
  if (dropout_threshold(rate) == 0 || !run.tape) return x;
  return run.apply(std::make_unique<Dropout>(rate), {std::move(x)})[0];
}

}  // namespace regather
