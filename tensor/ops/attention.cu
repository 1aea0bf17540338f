// Causal attention in tiles; no T x T matrix. With H heads of size D: forward 2 H T^2 D flops (two products, half of
// each masked), backward 7 products, since two kernels recompute the scores: one for dq and one for dk and dv, so that
// every sum has one owner and one order. The tiles are in attention_fp32.cu and attention_bf16.cu; here is what comes
// before backward: delta = dy . y of each row, 2 elements read for each of y and a float written a row. Limiter: memory
// bandwidth.
#include <algorithm>
#include <cmath>

#include "tensor/cuda/attention.cuh"
#include "tensor/cuda/reduce.cuh"

namespace regather::cuda {
namespace {

// A warp a row.
constexpr int kDeltaThreads = 128;
template <class T>
__global__ void __launch_bounds__(kDeltaThreads) attention_delta_kernel(AttentionTask<T> a, std::int64_t rows) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kDeltaThreads / 32) + threadIdx.x / 32;
  if (row >= rows) return;  // a whole warp
  const std::int64_t t = row % a.tokens, head = row / a.tokens % a.heads, b = row / a.tokens / a.heads + a.first_batch;
  const std::int64_t at = (b * a.tokens + t) * a.y_stride + head * a.d;
  float sum = 0;
  for (std::int64_t c = threadIdx.x % 32; c < a.d; c += 32)
    sum += widened(load(a.out + at + c)) * widened(load(a.dy + at + c));
  sum = reduce_warp(sum, Sum{});
  if (threadIdx.x % 32 == 0) store(a.delta + row, sum);
}

template <class T>
AttentionTask<T> task_of(const T* qkv, const AttentionSizes& z, const RandomMask& mask) {
  require_at_most("elements of an attention head", z.head_size, kMostHeadSize);
  AttentionTask<T> a{};
  a.qkv = qkv;
  a.batch = z.batch;
  a.tokens = z.tokens;
  a.heads = z.heads;
  a.kv_heads = z.kv_heads;
  a.d = z.head_size;
  a.stride = (z.heads + 2 * z.kv_heads) * z.head_size;
  a.y_stride = z.heads * z.head_size;
  a.scale = 1.0F / std::sqrt(static_cast<float>(z.head_size));
  a.mask = device_mask(mask);
  return a;
}
template <class T, class... Pointers>
bool rows_are_aligned(std::int64_t d, const Pointers*... pointers) {
  constexpr std::uintptr_t kBytes = 16;
  return d % static_cast<std::int64_t>(kBytes / sizeof(T)) == 0 &&
         ((reinterpret_cast<std::uintptr_t>(pointers) % kBytes == 0) && ...);
}

}  // namespace

template <class T>
void CudaElementOps<T>::attention(T* y, float* lse, const T* qkv, const AttentionSizes& sizes, const RandomMask& mask) {
  AttentionTask<T> a = task_of(qkv, sizes, mask);
  a.y = y;
  a.lse = lse;
  a.aligned = rows_are_aligned<T>(a.d, qkv, y);
  launch_attention(a, context_.stream());
}

template <class T>
void CudaElementOps<T>::attention_backward(T* dqkv, const T* qkv, const T* y, const float* lse, const T* dy,
                                           const AttentionSizes& sizes, const RandomMask& mask) {
  AttentionTask<T> a = task_of(qkv, sizes, mask);
  a.dqkv = dqkv;
  a.out = y;
  a.lse = const_cast<float*>(lse);  // only read here
  a.dy = dy;
  a.aligned = rows_are_aligned<T>(a.d, qkv, dy, dqkv);
  const std::int64_t each = a.heads * a.tokens;  // deltas of a sequence
  if (each == 0) return;
  const std::int64_t most = context_.room_for<float>(each);
  for (a.first_batch = 0; a.first_batch < a.batch; a.first_batch += most) {
    const std::int64_t batch = std::min(most, a.batch - a.first_batch), rows = batch * each;
    a.delta = context_.scratch<float>(rows);
    launch("attention_delta", attention_delta_kernel<T>, blocks_for(rows, kDeltaThreads / 32), kDeltaThreads, 0,
           context_.stream(), a, rows);
    launch_attention_backward(a, batch, context_.stream());
  }
}

template void CudaElementOps<float>::attention(float*, float*, const float*, const AttentionSizes&, const RandomMask&);
template void CudaElementOps<float>::attention_backward(float*, const float*, const float*, const float*, const float*,
                                                        const AttentionSizes&, const RandomMask&);
template void CudaElementOps<Bf16>::attention(Bf16*, float*, const Bf16*, const AttentionSizes&, const RandomMask&);
template void CudaElementOps<Bf16>::attention_backward(Bf16*, const Bf16*, const Bf16*, const float*, const Bf16*,
                                                       const AttentionSizes&, const RandomMask&);

}  // namespace regather::cuda
