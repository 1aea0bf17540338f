// Per element of the query and key heads: 2 elements moved (read x; write y), 3 flops; value heads are copied. The
// cosines and sines of T positions are made first, in double (the angle is exact to fp32 at any position), and then
// come from the cache. Limiter: memory bandwidth.
#include <algorithm>

#include "tensor/cuda/cuda_ops.h"
#include "tensor/cuda/quads.cuh"

namespace regather::cuda {
namespace {

constexpr int kThreads = 256;

struct Rotation {
  float cosine, sine;
};
__global__ void __launch_bounds__(kThreads) rotations_kernel(Rotation* table, std::int64_t first, std::int64_t count,
                                                             std::int64_t half, double theta, double sign) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count * half) return;
  const double position = static_cast<double>(first + i / half);
  const double angle = position * pow(theta, -static_cast<double>(i % half) / static_cast<double>(half));
  store(table + i, Rotation{static_cast<float>(cos(angle)), static_cast<float>(sign * sin(angle))});
}

template <class T>
struct RopeTask {
  T* y;
  const T* x;
  const Rotation* table;
  std::int64_t first, count;  // positions
  std::int64_t tokens, cols, half, rotated_heads;
};
// A thread rotates a pair or copies one element: item (b, t, i), i < rotated_heads half + value elements.
template <class T>
__global__ void __launch_bounds__(kThreads) rope_kernel(RopeTask<T> a, std::int64_t items) {
  const std::int64_t id = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (id >= items) return;
  const std::int64_t pairs = a.rotated_heads * a.half, each = a.cols - pairs;
  const std::int64_t i = id % each, t = id / each % a.count, b = id / each / a.count;
  const std::int64_t row = (b * a.tokens + a.first + t) * a.cols;
  if (i >= pairs) {
    store(a.y + row + pairs + i, load(a.x + row + pairs + i));
    return;
  }
  const std::int64_t at = row + i / a.half * 2 * a.half + i % a.half;
  const Rotation r = load(a.table + t * a.half + i % a.half);
  const float u = widened(load(a.x + at)), v = widened(load(a.x + at + a.half));
  store(a.y + at, rounded<T>(u * r.cosine - v * r.sine));
  store(a.y + at + a.half, rounded<T>(v * r.cosine + u * r.sine));
}

}  // namespace

template <class T>
void CudaElementOps<T>::rope(T* y, const T* x, const AttentionSizes& s, double theta, double sign) {
  const std::int64_t half = s.head_size / 2, rotated = s.heads + s.kv_heads,
                     cols = (rotated + s.kv_heads) * s.head_size;
  const std::int64_t most = context_.room_for<Rotation>(half);
  for (std::int64_t first = 0; first < s.tokens; first += most) {
    const std::int64_t count = std::min(most, s.tokens - first), items = s.batch * count * (cols - rotated * half);
    if (items == 0) return;
    auto* table = context_.scratch<Rotation>(count * half);
    launch("rotations", rotations_kernel, blocks_for(count * half, kThreads), kThreads, 0, context_.stream(), table,
           first, count, half, theta, sign);
    launch("rope", rope_kernel<T>, blocks_for(items, kThreads), kThreads, 0, context_.stream(),
           RopeTask<T>{y, x, table, first, count, s.tokens, cols, half, rotated}, items);
  }
}

template void CudaElementOps<float>::rope(float*, const float*, const AttentionSizes&, double, double);
template void CudaElementOps<Bf16>::rope(Bf16*, const Bf16*, const AttentionSizes&, double, double);

}  // namespace regather::cuda
