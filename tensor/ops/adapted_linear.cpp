// y = x w^T + b + s (x A^T) B^T, each adapter (A, B, s) in the columns of y that its rows of w make.
// u = x A^T,  v = s dy B;  dx = dy w + v A, dA += v^T x, dB += s dy^T u; dw, db as without adapters.
// Saves x, and only if w or an adapter is trained: u is computed again from it (2 r C flops a token instead of r
// values).
#include "tensor/ops/adapted_linear.h"

#include <algorithm>

#include "tensor/ops/checks.h"
#include "tensor/ops/gemm.h"
#include "tensor/ops/on_gpu.h"
#include "tensor/ops/parallel.h"

namespace regather {
namespace {

// f(Element<type of u and v>), T being that of activations and parameters: fp32, but for a GPU, whose products take
// factors of one type.
template <class T, class F>
void with_low(Device& device, F f) {
  device.gpu() ? f(Element<T>()) : f(Element<float>());
}

// On a GPU, or by the library of a CPU. scaled: the product times by, into a matrix of its own.
struct Products {
  Device& device;
  float* scratch;  // of a CPU's
  template <class A, class B, class C>
  void nt(std::int64_t m, std::int64_t n, std::int64_t k, const A* a, const B* b, C* c, Into into,
          RowStrides strides) const {
    if (on_gpu(device, [&](GpuOps& gpu) { gpu.gemm_nt(m, n, k, a, b, c, into, strides); })) return;
    gemm_nt(m, n, k, a, b, c, into, strides, scratch);
  }
  template <class A, class B, class C>
  void nn(std::int64_t m, std::int64_t n, std::int64_t k, const A* a, const B* b, C* c, Into into) const {
    if (on_gpu(device, [&](GpuOps& gpu) { gpu.gemm_nn(m, n, k, a, b, c, into); })) return;
    gemm_nn(m, n, k, a, b, c, into, {}, scratch);
  }
  template <class A, class B, class C>
  void tn(std::int64_t m, std::int64_t n, std::int64_t k, const A* a, const B* b, C* c, Into into,
          RowStrides strides = {}) const {
    if (on_gpu(device, [&](GpuOps& gpu) { gpu.gemm_tn(m, n, k, a, b, c, into, strides); })) return;
    gemm_tn(m, n, k, a, b, c, into, strides, scratch);
  }
  template <class A, class B, class C>
  void scaled_nt(std::int64_t m, std::int64_t n, std::int64_t k, const A* a, const B* b, C* c, float by) const {
    if (on_gpu(device, [&](GpuOps& gpu) { gpu.gemm_nt(m, n, k, a, b, c, Into::Write, {}, by); })) return;
    gemm_nt(m, n, k, a, b, c, Into::Write, {}, scratch);
    scale(c, m * n, by);
  }
  template <class A, class B, class C>
  void scaled_nn(std::int64_t m, std::int64_t n, std::int64_t k, const A* a, const B* b, C* c, RowStrides strides,
                 float by) const {
    if (on_gpu(device, [&](GpuOps& gpu) { gpu.gemm_nn(m, n, k, a, b, c, Into::Write, strides, by); })) return;
    gemm_nn(m, n, k, a, b, c, Into::Write, strides, scratch);
    scale(c, m * n, by);
  }
  static void scale(Bf16*, std::int64_t, float) { throw LogicError("on a CPU these are fp32"); }
  static void scale(float* x, std::int64_t n, float by) {
    parallel_blocks(n, kElementGrain, [&](auto begin, auto end) {
      for (auto i = begin; i < end; ++i) x[i] *= by;
    });
  }
};

class AdaptedLinear final : public Op {
 public:
  AdaptedLinear(LinearBias bias, std::vector<Adapter> adapters)
      : base_(make_linear(bias)), first_(bias == LinearBias::Added ? 2 : 1), adapters_(std::move(adapters)) {}
  std::string_view name() const override { return "adapted_linear"; }

  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape> params) const override {
    check(params.size() == first_ + 2 * adapters_.size(), "{}: {} adapters need {} parameters, got {}", name(),
          adapters_.size(), first_ + 2 * adapters_.size(), params.size());
    std::vector<ValueType> y = base_->outputs(in, params.first(first_));
    const std::int64_t out = params[0].dim(0), columns = params[0].dim(1);
    for (std::size_t k = 0; k < adapters_.size(); ++k) {
      const Adapter& a = adapters_[k];
      const Shape &down = params[first_ + 2 * k], &up = params[first_ + 2 * k + 1];
      check(a.first >= 0 && a.rows >= 0 && a.first + a.rows <= out, "{}: rows {} to {} of a weight {}", name(), a.first,
            a.first + a.rows, params[0].to_string());
      check(down.ndim() == 2 && up.ndim() == 2 && down.dim(1) == columns && up == (Shape{a.rows, down.dim(0)}),
            "{}: A is {} and B is {}, weight is {} of which {} rows are adapted", name(), down.to_string(),
            up.to_string(), params[0].to_string(), a.rows);
    }
    return y;
  }

  Saved saved(const Needs& needs) const override {
    Saved saved = base_->saved(base_needs(needs));
    if (needs.params >> first_ != 0) saved.inputs |= 1U;
    return saved;
  }

  double flops(std::span<const ValueType> in, std::span<const Shape> params) const override {
    double flops = base_->flops(in, params.first(first_));
    const auto tokens = static_cast<double>(in[0].shape.rows());
    for (std::size_t k = first_; k < params.size(); ++k) flops += 2.0 * tokens * static_cast<double>(params[k].numel());
    return flops;
  }

  double backward_flops(std::span<const ValueType> in, std::span<const Shape> params,
                        const Needs& needs) const override {
    double flops = base_->backward_flops(in, params.first(first_), base_needs(needs));
    const double each = 2.0 * static_cast<double>(in[0].shape.rows());
    for (std::size_t k = first_; k < params.size(); k += 2) {
      const auto down = static_cast<double>(params[k].numel()), up = static_cast<double>(params[k + 1].numel());
      const bool ddown = has(needs.params, k), dx = has(needs.inputs, 0);
      if (has(needs.params, k + 1)) flops += each * (down + up);  // u, dB
      if (ddown || dx) flops += each * up;                        // v
      flops += each * down * ((ddown ? 1 : 0) + (dx ? 1 : 0));
    }
    return flops;
  }

  // u; in backward v, too; and scratch of a CPU's products. Before them the linear layer has it all.
  std::int64_t workspace(DeviceKind device, Direction direction, std::span<const ValueType> in,
                         std::span<const Shape> params) const override {
    const bool cuda = device == DeviceKind::Cuda;
    const DType type = in[0].dtype, low_type = cuda ? type : DType::F32;  // see with_low
    const std::int64_t rows = in[0].shape.rows();
    std::int64_t rank = 0, scratch = 0;
    for (std::size_t k = first_; k < params.size(); k += 2) {
      const std::int64_t down = params[k].dim(0), columns = params[k].dim(1), up = params[k + 1].dim(0);
      rank = std::max(rank, down);
      scratch = std::max({scratch, gemm_scratch(type, rows, down, columns), gemm_scratch(type, rows, up, down)});
      if (direction == Direction::Backward)
        scratch = std::max({scratch, gemm_scratch(type, up, down, rows), gemm_scratch(type, rows, down, up),
                            gemm_scratch(type, down, columns, rows), gemm_scratch(type, rows, columns, down)});
    }
    const std::int64_t low =
        (direction == Direction::Forward ? 1 : 2) * rows * rank * static_cast<std::int64_t>(size_of(low_type));
    return std::max(low + (cuda ? 0 : scratch), base_->workspace(device, direction, in, params.first(first_)));
  }

  void forward(const Call& call) const override {
    base_->forward(call);
    const Sizes s(call.in[0].shape().rows(), call.param_shape(0));
    with_element(call.in[0].dtype(), [&]<class T>(Element<T>) {
      with_low<T>(call.device, [&]<class Low>(Element<Low>) { forward_of_adapters<T, Low>(call, s); });
    });
  }

  void backward(const BackwardCall& call) const override {
    base_->backward(call);
    const Sizes s(call.dout[0].shape().rows(), call.param_shape(0));
    with_element(call.dout[0].dtype(), [&]<class T>(Element<T>) {
      with_low<T>(call.device, [&]<class Low>(Element<Low>) { backward_of_adapters<T, Low>(call, s); });
    });
  }

 private:
  struct Sizes {
    Sizes(std::int64_t rows_of_x, const Shape& weight) : rows(rows_of_x), out(weight.dim(0)), in(weight.dim(1)) {}
    std::int64_t rows, out, in;
  };
  Needs base_needs(const Needs& needs) const {
    return {.inputs = needs.inputs, .params = needs.params & ((Set{1} << first_) - 1)};
  }
  std::size_t down(std::size_t k) const { return first_ + 2 * k; }
  template <class T, class Low>
  void forward_of_adapters(const Call& call, const Sizes& s) const {
    for (std::size_t k = 0; k < adapters_.size(); ++k) {
      const Adapter& a = adapters_[k];
      const std::int64_t rank = call.param_shape(down(k)).dim(0);
      Low* u = reinterpret_cast<Low*>(call.workspace);
      const Products products{call.device, reinterpret_cast<float*>(u + s.rows * rank)};
      scaled_low<T>(products, call, k, rank, u);
      products.nt(s.rows, a.rows, rank, u, call.param<T>(down(k) + 1), call.out[0].fresh<T>() + a.first, Into::Add,
                  {.c = s.out});
    }
  }
  template <class T, class Low>
  void backward_of_adapters(const BackwardCall& call, const Sizes& s) const {
    for (std::size_t k = 0; k < adapters_.size(); ++k) {
      const Adapter& a = adapters_[k];
      const std::int64_t rank = call.param_shape(down(k)).dim(0), low = s.rows * rank;
      const T* dy = call.dout[0].data<T>() + a.first;
      Low *u = reinterpret_cast<Low*>(call.workspace), *v = u + low;
      const Products products{call.device, reinterpret_cast<float*>(v + low)};
      if (float* dup = call.dparam(down(k) + 1)) {
        scaled_low<T>(products, call, k, rank, u);
        products.tn(a.rows, rank, s.rows, dy, u, dup, Into::Add, {.a = s.out});
      }
      float* ddown = call.dparam(down(k));
      if (!ddown && !call.din[0]) continue;
      products.scaled_nn(s.rows, rank, a.rows, dy, call.param<T>(down(k) + 1), v, {.a = s.out}, a.scale);
      if (ddown) products.tn(rank, s.in, s.rows, v, call.in[0].data<T>(), ddown, Into::Add);
      if (call.din[0]) products.nn(s.rows, s.in, rank, v, call.param<T>(down(k)), call.din[0].fresh<T>(), Into::Add);
    }
  }
  // s x A^T
  template <class T, class Low>
  void scaled_low(const Products& products, const Call& call, std::size_t k, std::int64_t rank, Low* u) const {
    const Tensor& x = call.in[0];
    products.scaled_nt(x.shape().rows(), rank, x.shape().cols(), x.data<T>(), call.param<T>(down(k)), u,
                       adapters_[k].scale);
  }

  std::unique_ptr<const Op> base_;
  std::size_t first_;  // parameters of the linear layer
  std::vector<Adapter> adapters_;
};

}  // namespace

std::unique_ptr<const Op> make_adapted_linear(LinearBias bias, std::vector<Adapter> adapters) {
  return std::make_unique<AdaptedLinear>(bias, std::move(adapters));
}

}  // namespace regather
