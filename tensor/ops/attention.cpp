// P = softmax(q k^T / sqrt(D)) over s <= t, y = P v. Second output: lse [B, H, T], the logarithm of each row's
// normaliser, always fp32. Saves qkv, y and lse: every probability is exp(score - lse), and rowsum(P dP) is dy . y; so
// no [T, T] matrix is ever stored. Work and workspace are per key/value head (tensor/ops/kernels/attention.cpp), one
// piece of workspace a thread.
#include "tensor/ops/attention.h"

#include <cmath>

#include "tensor/ops/checks.h"
#include "tensor/ops/dropout.h"
#include "tensor/ops/kernels.h"
#include "tensor/ops/on_gpu.h"
#include "tensor/ops/parallel.h"

namespace regather {
namespace {

class Attention final : public Op {
 public:
  Attention(std::int64_t heads, std::int64_t kv_heads, float dropout)
      : heads_(heads),
        kv_heads_(kv_heads),
        threshold_(dropout_threshold(dropout)),
        keep_scale_(1.0F / (1.0F - dropout)) {
    check(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, "attention: {} heads cannot share {} key/value heads",
          heads, kv_heads);
  }
  std::string_view name() const override { return "attention"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape> params) const override {
    check_counts(name(), in, 1, params, 0);
    check_real(name(), "qkv", in[0]);
    const Shape& qkv = in[0].shape;
    check(qkv.ndim() == 3, "attention: qkv must be [B, T, (H + 2 KV) D], is {}", qkv.to_string());
    check(qkv.cols() % (heads_ + 2 * kv_heads_) == 0 && qkv.cols() > 0,
          "attention: qkv is {}; its last dimension must be a multiple of {} heads + 2 x {} key/value heads = {}",
          qkv.to_string(), heads_, kv_heads_, heads_ + 2 * kv_heads_);
    return {{qkv.with_last(heads_ * head_size(qkv)), in[0].dtype}, {{qkv.dim(0), heads_, qkv.dim(1)}}};
  }
  Saved saved(const Needs&) const override { return {.inputs = 1, .outputs = 3}; }
  std::int64_t workspace(DeviceKind device, Direction direction, std::span<const ValueType> in,
                         std::span<const Shape>) const override {
    if (device == DeviceKind::Cuda) return 0;
    const Shape& qkv = in[0].shape;
    return num_workers(qkv.dim(0) * kv_heads_) * scratch(qkv, direction) * 4;
  }
  double flops(std::span<const ValueType> in,
               std::span<const Shape>) const override {  // two products, half of each masked
    const Shape& qkv = in[0].shape;
    const double pairs = 0.5 * static_cast<double>(qkv.dim(1)) * static_cast<double>(qkv.dim(1) + 1);
    return 4.0 * static_cast<double>(qkv.dim(0) * heads_ * head_size(qkv)) * pairs;
  }
  double backward_flops(std::span<const ValueType> in, std::span<const Shape> params, const Needs&) const override {
    return 2.5 * flops(in, params);  // five products: the scores again, dP, dv, dq, dk
  }

  void forward(const Call& call) const override {
    const Tensor& qkv = call.in[0];
    with_element(qkv.dtype(), [&]<class T>(Element<T>) {
      const T* x = qkv.data<T>();
      T* y = call.out[0].fresh<T>();
      float* lse = call.out[1].fresh();
      const auto gpu_forward = [&](GpuOps& gpu) { gpu.on<T>().attention(y, lse, x, sizes(qkv.shape()), mask(call)); };
      if (on_gpu(call.device, gpu_forward)) return;
      for_each_head(
          call, qkv.shape(), Direction::Forward, [&](const AttentionShape& s, const Offsets& at, float* workspace) {
            kernels_on<T>().attention_forward({s, x + at.q, x + at.k, x + at.v, y + at.y, lse + at.lse, workspace});
          });
    });
  }

  void backward(const BackwardCall& call) const override {
    if (!call.din[0]) return;
    const Tensor& qkv = call.in[0];
    with_element(qkv.dtype(), [&]<class T>(Element<T>) {
      const T *x = qkv.data<T>(), *y = call.out[0].data<T>(), *dy = call.dout[0].data<T>();
      const float* lse = call.out[1].data();
      T* dx = call.din[0].fresh<T>();
      const auto gpu_backward = [&](GpuOps& gpu) {
        gpu.on<T>().attention_backward(dx, x, y, lse, dy, sizes(qkv.shape()), mask(call));
      };
      if (on_gpu(call.device, gpu_backward)) return;
      for_each_head(call, qkv.shape(), Direction::Backward,
                    [&](const AttentionShape& s, const Offsets& at, float* workspace) {
                      kernels_on<T>().attention_backward({s, x + at.q, x + at.k, x + at.v, y + at.y, lse + at.lse,
                                                          dy + at.y, dx + at.q, dx + at.k, dx + at.v, workspace});
                    });
    });
  }

 private:
  struct Offsets {
    std::int64_t q, k, v, y, lse;
  };
  std::int64_t head_size(const Shape& qkv) const { return qkv.cols() / (heads_ + 2 * kv_heads_); }
  AttentionSizes sizes(const Shape& qkv) const { return {qkv.dim(0), qkv.dim(1), heads_, kv_heads_, head_size(qkv)}; }
  RandomMask mask(const Call& call) const { return {threshold_, keep_scale_, call.key}; }
  std::int64_t scratch(const Shape& qkv, Direction direction) const {  // floats a worker, whole cache lines
    return (kernels().attention_scratch(qkv.dim(1), head_size(qkv), direction == Direction::Backward) + 15) / 16 * 16;
  }

  template <class F>
  void for_each_head(const Call& call, const Shape& qkv, Direction direction, F f) const {
    const std::int64_t tokens = qkv.dim(1), size = head_size(qkv), group = heads_ / kv_heads_,
                       piece = scratch(qkv, direction);
    const auto key = call.key.words();
    parallel_for(qkv.dim(0) * kv_heads_, [&](std::int64_t i, int worker) {
      const std::int64_t b = i / kv_heads_, kv = i % kv_heads_, head = kv * group, row = b * tokens * qkv.cols();
      const AttentionShape shape = {.tokens = tokens,
                                    .head_size = size,
                                    .group = group,
                                    .qkv_stride = qkv.cols(),
                                    .y_stride = heads_ * size,
                                    .scale = 1.0F / std::sqrt(static_cast<float>(size)),
                                    .threshold = threshold_,
                                    .keep_scale = keep_scale_,
                                    .key = {key[0], key[1]},
                                    .sequence = call.key.sequence + static_cast<std::uint64_t>(b),
                                    .first_head = head};
      const Offsets at = {.q = row + head * size,
                          .k = row + (heads_ + kv) * size,
                          .v = row + (heads_ + kv_heads_ + kv) * size,
                          .y = b * tokens * heads_ * size + head * size,
                          .lse = (b * heads_ + head) * tokens};
      f(shape, at, call.workspace + worker * piece);
    });
  }

  std::int64_t heads_, kv_heads_;
  std::uint32_t threshold_;
  float keep_scale_;
};

}  // namespace

Tensor attention(Run& run, Tensor qkv, std::int64_t heads, std::int64_t kv_heads, float dropout) {
  return run.apply(std::make_unique<Attention>(heads, kv_heads, run.tape ? dropout : 0.0F), {std::move(qkv)})[0];
}

}  // namespace regather
