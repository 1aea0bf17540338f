// y = x w^T + b;  dx = dy w, dw += dy^T x, db += sum over rows of dy.
// Saves x, and only if w is trained: dx and db do not need it, so a frozen layer saves nothing.
#include "tensor/ops/linear.h"

#include <algorithm>

#include "tensor/ops/adapted_linear.h"
#include "tensor/ops/checks.h"
#include "tensor/ops/gemm.h"
#include "tensor/ops/kernels.h"
#include "tensor/ops/on_gpu.h"
#include "tensor/ops/parallel.h"

namespace regather {
namespace {

constexpr std::int64_t kRowGrain = 64, kColumnGrain = 256;

class Linear final : public Op {
 public:
  explicit Linear(bool has_bias) : has_bias_(has_bias) {}
  std::string_view name() const override { return "linear"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape> params) const override {
    check_counts(name(), in, 1, params, has_bias_ ? 2 : 1);
    check_real(name(), "x", in[0]);
    const Shape &x = in[0].shape, &w = params[0];
    check(w.ndim() == 2 && w.dim(1) == x.cols(), "linear: weight is {}, x is {} with C = {}", w.to_string(),
          x.to_string(), x.cols());
    if (has_bias_)
      check(params[1] == Shape{w.dim(0)}, "linear: bias is {}, weight is {} with O = {}", params[1].to_string(),
            w.to_string(), w.dim(0));
    return {{x.with_last(w.dim(0)), in[0].dtype}};
  }
  Saved saved(const Needs& needs) const override { return {.inputs = needs.params & 1U}; }
  std::int64_t workspace(DeviceKind device, Direction direction, std::span<const ValueType> in,
                         std::span<const Shape> params) const override {
    if (device == DeviceKind::Cuda) return 0;
    const std::int64_t rows = in[0].shape.rows(), out = params[0].dim(0), columns = params[0].dim(1);
    if (direction == Direction::Forward) return gemm_scratch(in[0].dtype, rows, out, columns);
    return std::max(gemm_scratch(in[0].dtype, rows, columns, out), gemm_scratch(in[0].dtype, out, columns, rows));
  }
  double flops(std::span<const ValueType> in, std::span<const Shape> params) const override {
    return 2.0 * static_cast<double>(in[0].shape.numel()) * static_cast<double>(params[0].dim(0));
  }
  double backward_flops(std::span<const ValueType> in, std::span<const Shape> params,
                        const Needs& needs) const override {  // a product for dx, and one for dw
    return flops(in, params) * ((has(needs.inputs, 0) ? 1 : 0) + (has(needs.params, 0) ? 1 : 0));
  }

  void forward(const Call& call) const override {
    const Tensor& x = call.in[0];
    const std::int64_t rows = x.shape().rows(), out = call.out[0].shape().cols(), in = x.shape().cols();
    const Into into = has_bias_ ? Into::Add : Into::Write;
    with_element(x.dtype(), [&]<class T>(Element<T>) {
      T* y = call.out[0].fresh<T>();
      const T *weight = call.param<T>(0), *bias = has_bias_ ? call.param<T>(1) : nullptr;
      const auto gpu_forward = [&](GpuOps& gpu) {
        if (bias)
          gpu.linear(rows, out, in, x.data<T>(), weight, bias, y);
        else
          gpu.gemm_nt(rows, out, in, x.data<T>(), weight, y, into);
      };
      if (on_gpu(call.device, gpu_forward)) return;
      if (bias)  // the product adds to it: one pass over y less than adding it afterwards, and one rounding
        parallel_blocks(rows, kRowGrain, [&](auto begin, auto end) {
          kernels_on<T>().fill_rows(y + begin * out, bias, end - begin, out);
        });
      gemm_nt(rows, out, in, x.data<T>(), weight, y, into, {}, call.workspace);
    });
  }

  void backward(const BackwardCall& call) const override {
    const Tensor& dy = call.dout[0];
    const std::int64_t rows = dy.shape().rows(), out = dy.shape().cols(), in = call.param_shape(0).dim(1);
    with_element(dy.dtype(), [&]<class T>(Element<T>) {
      const T* g = dy.data<T>();
      T* dx = call.din[0] ? call.din[0].fresh<T>() : nullptr;
      float *dw = call.dparam(0), *db = has_bias_ ? call.dparam(1) : nullptr;
      const T *weight = dx ? call.param<T>(0) : nullptr, *x = dw ? call.in[0].data<T>() : nullptr;
      const auto gpu_backward = [&](GpuOps& gpu) {
        if (dx) gpu.gemm_nn(rows, in, out, g, weight, dx, Into::Write);
        if (dw) gpu.gemm_tn(out, in, rows, g, x, dw, Into::Add);
        if (db) gpu.on<T>().add_column_sums(db, g, rows, out);
      };
      if (on_gpu(call.device, gpu_backward)) return;
      if (dx) gemm_nn(rows, in, out, g, weight, dx, Into::Write, {}, call.workspace);
      if (dw) gemm_tn(out, in, rows, g, x, dw, Into::Add, {}, call.workspace);
      if (!db) return;
      parallel_blocks(out, kColumnGrain, [&](auto begin, auto end) {
        kernels_on<T>().add_column_sums(db + begin, g + begin, rows, end - begin, out);
      });
    });
  }

 private:
  bool has_bias_;
};

}  // namespace

std::unique_ptr<const Op> make_linear(LinearBias bias) { return std::make_unique<Linear>(bias == LinearBias::Added); }

Tensor linear(Run& run, Tensor x, int weight, int bias) {
  const LinearBias has_bias = bias >= 0 ? LinearBias::Added : LinearBias::None;
  std::vector<int> params = {weight};
  if (bias >= 0) params.push_back(bias);
  const std::vector<Adapter>& adapters = run.params.info(weight).adapters;
  for (const Adapter& a : adapters) {
    params.push_back(weight + a.down);
    params.push_back(weight + a.up);
  }
  auto op = adapters.empty() ? make_linear(has_bias) : make_adapted_linear(has_bias, adapters);
  return run.apply(std::move(op), {std::move(x)}, std::move(params))[0];
}

}  // namespace regather
