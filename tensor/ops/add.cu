// y = a + b. Per element: 3 elements moved (read a, b; write y), 1 flop. Limiter: memory bandwidth.
// add_column_sums: per element 1 read, 1 flop; the fp32 partial sums of a chunk of rows are 1/64 of their number or
// less.
// Limiter: memory bandwidth. The order of additions: rows of a chunk, eight interleaved chains; then chunks.
#include <algorithm>

#include "tensor/cuda/cuda_ops.h"
#include "tensor/cuda/quads.cuh"

namespace regather::cuda {
namespace {

template <class T>
struct Add {
  T* y;
  const T *a, *b;
  template <bool kAligned>
  __device__ void quad(std::int64_t i, std::int64_t n) const {
    Float4 x = load_quad<kAligned>(a, i, n);
    const Float4 z = load_quad<kAligned>(b, i, n);
#pragma unroll
    for (int k = 0; k < 4; ++k) x.v[k] += z.v[k];
    store_quad<kAligned>(y, i, n, x);
  }
};

// A block sums a chunk of rows of 128 columns: 32 threads of four columns, eight rows at a time.
constexpr int kLanes = 32, kRows = 8, kColumns = 4 * kLanes;
struct ColumnSums {
  Float4 v[kRows][kLanes];
};
template <class T, bool kAligned>
__global__ void __launch_bounds__(kLanes* kRows)
    column_sums_kernel(float* partial, const T* x, std::int64_t rows, std::int64_t cols, std::int64_t chunk) {
  auto& shared = block_shared<ColumnSums>().v;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kColumns + 4 * threadIdx.x;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * chunk, end = min(rows, first + chunk);
  Float4 sum{};
  if (i < cols)
    for (std::int64_t r = first + threadIdx.y; r < end; r += kRows) {
      const Float4 value = load_quad<kAligned>(x + r * cols, i, cols);
#pragma unroll
      for (int k = 0; k < 4; ++k) sum.v[k] += value.v[k];
    }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || i >= cols) return;
#pragma unroll
  for (int r = 1; r < kRows; ++r)
#pragma unroll
    for (int k = 0; k < 4; ++k) sum.v[k] += shared[r][threadIdx.x].v[k];
  store_quad<kAligned>(partial + blockIdx.y * cols, i, cols, sum);
}

__global__ void __launch_bounds__(kQuadThreads)
    add_partial_sums_kernel(float* to, const float* x, std::int64_t chunks, std::int64_t cols, std::int64_t stride) {
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * kQuadThreads + threadIdx.x;
  if (c >= cols) return;
  float sum = 0;
  for (std::int64_t k = 0; k < chunks; ++k) sum += load(x + k * stride + c);
  store(to + c, load(to + c) + sum);
}

}  // namespace

template <class T>
void add(cudaStream_t stream, T* y, const T* a, const T* b, std::int64_t n) {
  launch_quads("add", all_aligned(y, a, b), Add<T>{y, a, b}, n, stream);
}
template <class T>
void CudaElementOps<T>::add(T* y, const T* a, const T* b, std::int64_t n) {
  cuda::add(context_.stream(), y, a, b, n);
}

template <class T>
void CudaElementOps<T>::add_column_sums(float* sums, const T* x, std::int64_t rows, std::int64_t cols) {
  if (rows == 0 || cols == 0) return;
  constexpr std::int64_t kChunkRows = 64, kMostChunks = 64;
  const std::int64_t chunks =
      std::clamp<std::int64_t>(rows / kChunkRows, 1, std::min(kMostChunks, context_.room_for<float>(cols)));
  const std::int64_t chunk = (rows + chunks - 1) / chunks;
  float* partial = context_.scratch<float>(chunks * cols);
  const dim3 grid(blocks_for(cols, kColumns), static_cast<unsigned>(chunks));
  const bool aligned = all_aligned(x) && cols % 4 == 0;
  launch("column_sums", aligned ? column_sums_kernel<T, true> : column_sums_kernel<T, false>, grid, dim3(kLanes, kRows),
         0, context_.stream(), partial, x, rows, cols, chunk);
  context_.add_partial_sums(sums, partial, chunks, cols, cols);
}

void OpContext::add_partial_sums(float* to, const float* x, std::int64_t chunks, std::int64_t cols,
                                 std::int64_t stride) {
  launch("add_partial_sums", add_partial_sums_kernel, blocks_for(cols, kQuadThreads), kQuadThreads, 0, stream_, to, x,
         chunks, cols, stride);
}

template void add(cudaStream_t, float*, const float*, const float*, std::int64_t);
template void add(cudaStream_t, Bf16*, const Bf16*, const Bf16*, std::int64_t);
template void CudaElementOps<float>::add(float*, const float*, const float*, std::int64_t);
template void CudaElementOps<float>::add_column_sums(float*, const float*, std::int64_t, std::int64_t);
template void CudaElementOps<Bf16>::add(Bf16*, const Bf16*, const Bf16*, std::int64_t);
template void CudaElementOps<Bf16>::add_column_sums(float*, const Bf16*, std::int64_t, std::int64_t);

}  // namespace regather::cuda
