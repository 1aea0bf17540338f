// (a, b) -> (a cos - b sin, b cos + a sin) for the pairs (i, i + D/2) of each query and key head, at angle t
// theta^(-2i/D). Saves nothing: the gradient is the inverse rotation. Angles never exist in less than double precision:
// position 64 m + r is the product of two rotations, 64 m (by the library, once per 64 rows) and r (a table of 64 rows
// in the workspace); only the final cosine and sine are rounded: to fp32, whatever
// the type of the elements that they rotate.
#include "tensor/ops/rope.h"

#include <algorithm>
#include <cmath>

#include "tensor/ops/checks.h"
#include "tensor/ops/kernels.h"
#include "tensor/ops/on_gpu.h"
#include "tensor/ops/parallel.h"

namespace regather {
namespace {

constexpr std::int64_t kSpan = 64;

class Rope final : public Op {
 public:
  Rope(std::int64_t heads, std::int64_t kv_heads, double theta) : heads_(heads), kv_heads_(kv_heads), theta_(theta) {
    check(heads > 0 && kv_heads > 0, "rope: {} heads and {} key/value heads; both must be positive", heads, kv_heads);
    check(theta > 0 && std::isfinite(theta), "rope: theta must be positive, is {}", theta);
  }
  std::string_view name() const override { return "rope"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape> params) const override {
    check_counts(name(), in, 1, params, 0);
    check_real(name(), "qkv", in[0]);
    const Shape& qkv = in[0].shape;
    const std::int64_t all = heads_ + 2 * kv_heads_;
    check(qkv.ndim() == 3 && qkv.cols() > 0 && qkv.cols() % (2 * all) == 0,
          "rope: qkv is {}; it must be [B, T, {} D] ({} heads + 2 x {} key/value heads) with D even", qkv.to_string(),
          all, heads_, kv_heads_);
    return {in[0]};
  }
  Saved saved(const Needs&) const override { return {}; }
  std::int64_t workspace(DeviceKind device, Direction, std::span<const ValueType> in,
                         std::span<const Shape>) const override {
    if (device == DeviceKind::Cuda) return 0;
    const Shape& qkv = in[0].shape;
    return (2 * kSpan * 8 + spans(qkv) * (2 * 8 + 2 * 4)) * half(qkv);
  }
  double flops(std::span<const ValueType> in, std::span<const Shape>) const override {
    const Shape& qkv = in[0].shape;
    return 6.0 * static_cast<double>(qkv.rows() * (heads_ + kv_heads_) * half(qkv));
  }
  void forward(const Call& call) const override { rotate(call, call.in[0], call.out[0], 1.0); }
  void backward(const BackwardCall& call) const override {
    if (call.din[0]) rotate(call, call.dout[0], call.din[0], -1.0);
  }

 private:
  std::int64_t half(const Shape& qkv) const { return qkv.cols() / (2 * (heads_ + 2 * kv_heads_)); }
  static std::int64_t spans(const Shape& qkv) { return (qkv.dim(1) + kSpan - 1) / kSpan; }

  void fill(double* cosine, double* sine, std::int64_t n, double position, double sign) const {
    for (std::int64_t i = 0; i < n; ++i) {
      const double angle = position * std::pow(theta_, -static_cast<double>(i) / static_cast<double>(n));
      cosine[i] = std::cos(angle);
      sine[i] = sign * std::sin(angle);
    }
  }

  void rotate(const Call& call, const Tensor& from, Tensor& to, double sign) const {
    with_element(from.dtype(), [&]<class T>(Element<T>) {
      const Shape& qkv = from.shape();
      const AttentionSizes sizes = {qkv.dim(0), qkv.dim(1), heads_, kv_heads_, 2 * half(qkv)};
      if (!on_gpu(call.device,
                  [&](GpuOps& gpu) { gpu.on<T>().rope(to.fresh<T>(), from.data<T>(), sizes, theta_, sign); }))
        rotate(call.workspace, from.data<T>(), to.fresh<T>(), qkv, sign);
    });
  }
  template <class T>
  void rotate(float* workspace, const T* x, T* y, const Shape& qkv, double sign) const {
    const std::int64_t batch = qkv.dim(0), length = qkv.dim(1), cols = qkv.cols(), n = half(qkv);
    double* near = reinterpret_cast<double*>(workspace);  // rotations by 0 .. 63 positions
    for (std::int64_t r = 0; r < std::min(kSpan, length); ++r)
      fill(near + 2 * r * n, near + (2 * r + 1) * n, n, static_cast<double>(r), sign);
    double* far = near + 2 * kSpan * n;
    float* rows = reinterpret_cast<float*>(far + 2 * spans(qkv) * n);
    parallel_for(spans(qkv), [&](std::int64_t m, int) {
      double *far_cosine = far + 2 * m * n, *far_sine = far_cosine + n;
      float *cosine = rows + 2 * m * n, *sine = cosine + n;
      fill(far_cosine, far_sine, n, static_cast<double>(m * kSpan), sign);
      for (std::int64_t t = m * kSpan; t < std::min(length, (m + 1) * kSpan); ++t) {
        const double *c = near + 2 * (t - m * kSpan) * n, *s = c + n;
        for (std::int64_t i = 0; i < n; ++i) {
          cosine[i] = static_cast<float>(far_cosine[i] * c[i] - far_sine[i] * s[i]);
          sine[i] = static_cast<float>(far_sine[i] * c[i] + far_cosine[i] * s[i]);
        }
        for (std::int64_t b = 0; b < batch; ++b) {
          const std::int64_t at = (b * length + t) * cols, rotated = 2 * (heads_ + kv_heads_) * n;
          kernels_on<T>().rotate_heads(y + at, x + at, cosine, sine, heads_ + kv_heads_, n);
          std::copy_n(x + at + rotated, cols - rotated, y + at + rotated);
        }
      }
    });
  }

  std::int64_t heads_, kv_heads_;
  double theta_;
};

}  // namespace

Tensor rope(Run& run, Tensor qkv, std::int64_t heads, std::int64_t kv_heads, double theta) {
  return run.apply(std::make_unique<Rope>(heads, kv_heads, theta), {std::move(qkv)})[0];
}

}  // namespace regather
