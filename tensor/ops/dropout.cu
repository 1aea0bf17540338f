// Per element: 2 elements moved (read x; write y) and a quarter of a Philox block of 10 rounds, about 25 integer
// operations. Limiter: memory bandwidth.
#include <algorithm>

#include "tensor/cuda/cuda_ops.h"
#include "tensor/cuda/math.cuh"
#include "tensor/cuda/quads.cuh"

namespace regather::cuda {
namespace {

// A quad of a sequence is one Philox block. Sequences are rows of the grid.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kQuadThreads)
    dropout_kernel(T* y, const T* x, std::int64_t size, std::int64_t sequences, DeviceMask mask) {
  const std::int64_t i = 4 * (static_cast<std::int64_t>(blockIdx.x) * kQuadThreads + threadIdx.x);
  if (i >= size) return;
  for (std::int64_t b = blockIdx.y; b < sequences; b += gridDim.y) {
    Float4 q = load_quad<kAligned>(x + b * size, i, size);
    const PhiloxBlock words = mask.quad(static_cast<std::uint64_t>(b), static_cast<std::uint64_t>(i / 4));
#pragma unroll
    for (int k = 0; k < 4; ++k)  // a dropped infinity is 0, not NaN
      q.v[k] = words[static_cast<std::size_t>(k)] < mask.threshold ? 0.0F : q.v[k] * mask.scale;
    store_quad<kAligned>(y + b * size, i, size, q);
  }
}

}  // namespace

template <class T>
void CudaElementOps<T>::dropout(T* y, const T* x, std::int64_t sequences, std::int64_t size, const RandomMask& mask) {
  if (sequences == 0 || size == 0) return;
  constexpr std::int64_t kMostRows = 32768;
  const dim3 grid(blocks_for(size, 4 * kQuadThreads), static_cast<unsigned>(std::min(sequences, kMostRows)));
  const bool aligned = all_aligned(y, x) && size % 4 == 0;
  launch("dropout", aligned ? dropout_kernel<T, true> : dropout_kernel<T, false>, grid, kQuadThreads, 0,
         context_.stream(), y, x, size, sequences, device_mask(mask));
}

template void CudaElementOps<float>::dropout(float*, const float*, std::int64_t, std::int64_t, const RandomMask&);
template void CudaElementOps<Bf16>::dropout(Bf16*, const Bf16*, std::int64_t, std::int64_t, const RandomMask&);

}  // namespace regather::cuda
