// Sums and maxima over a warp or a block. The order of additions is fixed by the number of threads.
#pragma once
#include "tensor/cuda/launch.cuh"

namespace regather::cuda {

constexpr unsigned kAllLanes = 0xffffffffU;
constexpr int kMaxWarps = 32;

struct Sum {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Over each kLanes neighbours of a warp, all of whose lanes call; every lane gets the result of its neighbours.
template <int kLanes = 32, class F, class T>
__device__ __forceinline__ T reduce_warp(T value, F f) {
#pragma unroll
  for (int bits = kLanes / 2; bits > 0; bits /= 2) value = f(value, __shfl_xor_sync(kAllLanes, value, bits));
  return value;
}

template <class T, int N>
struct Partials {
  T v[N][kMaxWarps];
};
// N values at once; every thread gets the results. blockDim.x is a multiple of 32; shared is free before and after.
template <int N, class F, class T>
__device__ __forceinline__ void reduce_block(T (&values)[N], Partials<T, N>& shared, F f) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    values[k] = reduce_warp(values[k], f);
    if (lane == 0) shared.v[k][warp] = values[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < N; ++k) {
    T all = shared.v[k][0];
    for (int w = 1; w < warps; ++w) all = f(all, shared.v[k][w]);
    values[k] = all;
  }
  __syncthreads();
}

}  // namespace regather::cuda
