// Four neighbouring elements at a time, fp32 or bf16, as fp32: one access of 16 or 8 bytes where the addresses allow
// it, four elsewhere. Both give each thread the same elements, so results do not depend on addresses.
#pragma once
#include <type_traits>

#include "tensor/cuda/bf16.cuh"
#include "tensor/cuda/launch.cuh"

namespace regather::cuda {

// [i, i + 4) of p[0 .. n); past the end: 0.
template <bool kAligned, class T>
__device__ __forceinline__ Float4 load_quad(const T* p, std::int64_t i, std::int64_t n) {
  Float4 quad;
  if constexpr (kAligned)
    if (i + 4 <= n) {
      const Pack<T, 4> pack = load(reinterpret_cast<const Pack<T, 4>*>(p + i));
#pragma unroll
      for (int k = 0; k < 4; ++k) quad.v[k] = widened(pack.v[k]);
      return quad;
    }
#pragma unroll
  for (int k = 0; k < 4; ++k) quad.v[k] = i + k < n ? widened(load(p + i + k)) : 0.0F;
  return quad;
}
template <bool kAligned, class T>
__device__ __forceinline__ void store_quad(T* p, std::int64_t i, std::int64_t n, const Float4& quad) {
  const Pack<T, 4> pack = rounded<T>(quad);
  if constexpr (kAligned)
    if (i + 4 <= n) {
      store(reinterpret_cast<Pack<T, 4>*>(p + i), pack);
      return;
    }
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (i + k < n) store(p + i + k, pack.v[k]);
}

// Every one of these arrays may be read in quads (null ones are not read).
template <class... Elements>
bool all_aligned(const Elements*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % sizeof(Pack<Elements, 4>) == 0) && ...);
}

inline unsigned blocks_for(std::int64_t n, std::int64_t each) { return static_cast<unsigned>((n + each - 1) / each); }

// op.template quad<kAligned>(i, n) for i = 0, 4, 8, ...
constexpr int kQuadThreads = 256;
template <bool kAligned, class Op>
__global__ void __launch_bounds__(kQuadThreads) quads_kernel(Op op, std::int64_t n) {
  const std::int64_t i = 4 * (static_cast<std::int64_t>(blockIdx.x) * kQuadThreads + threadIdx.x);
  if (i < n) op.template quad<kAligned>(i, n);
}
template <class Op>
void launch_quads(const char* name, bool aligned, const Op& op, std::int64_t n, cudaStream_t stream) {
  if (n == 0) return;
  launch(name, aligned ? quads_kernel<true, Op> : quads_kernel<false, Op>, blocks_for(n, 4 * kQuadThreads),
         kQuadThreads, 0, stream, op, n);
}

}  // namespace regather::cuda
