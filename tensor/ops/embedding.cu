// Forward, per element: 2 elements moved (read the table; write x), 3 and 1 flop with positions. Limiter: memory
// bandwidth and, for the table's rows, its latency. Backward: dtable, per element 1 read, and 8 bytes for each element
// of a distinct token's row; each distinct token is summed by the blocks of its first occurrence, in the order of (b,
// t), without atomics. To find occurrences every block reads the tokens (4 N bytes, from the cache): N^2 / 2
// comparisons for each 512 columns. dpositions: 1 read an element. Limiter: memory bandwidth for long rows, the scan of
// the tokens for short ones.
#include <algorithm>

#include "tensor/cuda/cuda_ops.h"
#include "tensor/cuda/quads.cuh"

namespace regather::cuda {
namespace {

template <class T>
struct EmbeddingTask {
  T* x;
  const std::int32_t* tokens;
  const T *table, *positions;
  std::int64_t length, cols, vocab;
  Fault* fault;
};
template <class T, bool kAligned>
__global__ void __launch_bounds__(kQuadThreads) embedding_kernel(EmbeddingTask<T> a, std::int64_t quads) {
  const std::int64_t id = static_cast<std::int64_t>(blockIdx.x) * kQuadThreads + threadIdx.x;
  if (id >= quads) return;
  const std::int64_t each = (a.cols + 3) / 4, n = id / each, i = id % each * 4;
  const std::int32_t token = load(a.tokens + n);
  Float4 value{};
  if (token >= 0 && token < a.vocab) {
    value = load_quad<kAligned>(a.table + token * a.cols, i, a.cols);
  } else if (i == 0 && atomicCAS(&a.fault->kind, 0, static_cast<int>(kTokenOutsideVocabulary)) == 0) {
    store(&a.fault->value, token);
    store(&a.fault->first, static_cast<std::int32_t>(n / a.length));
    store(&a.fault->second, static_cast<std::int32_t>(n % a.length));
    store(&a.fault->limit, static_cast<std::int32_t>(a.vocab));
  }
  if (a.positions) {
    const Float4 position = load_quad<kAligned>(a.positions + n % a.length * a.cols, i, a.cols);
#pragma unroll
    for (int k = 0; k < 4; ++k) value.v[k] += position.v[k];
  }
  store_quad<kAligned>(a.x + n * a.cols, i, a.cols, value);
}

constexpr int kThreads = 128;  // four columns each
struct Matches {
  unsigned of_warp[kThreads / 32];
};
// Block (n, slab of columns) sums the gradients of token n's row, if n is where the token occurs first.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads) embedding_table_kernel(float* dtable, const std::int32_t* tokens,
                                                                   const T* dx, std::int64_t count, std::int64_t cols) {
  auto& matches = block_shared<Matches>().of_warp;
  const std::int64_t n = blockIdx.x, i = 4 * (static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x);
  const std::int32_t mine = load(tokens + n);
  bool earlier = false;
  for (std::int64_t j = threadIdx.x; j < n && !earlier; j += kThreads) earlier = load(tokens + j) == mine;
  if (__syncthreads_or(earlier ? 1 : 0) != 0) return;
  Float4 sum{};
  for (std::int64_t first = n; first < count; first += kThreads) {
    const std::int64_t j = first + threadIdx.x;
    const unsigned found = __ballot_sync(0xffffffffU, j < count && load(tokens + min(j, count - 1)) == mine ? 1 : 0);
    if (threadIdx.x % 32 == 0) matches[threadIdx.x / 32] = found;
    __syncthreads();
    for (int w = 0; w < kThreads / 32; ++w)
      for (unsigned left = matches[w]; left != 0; left &= left - 1) {
        const std::int64_t row = first + 32 * w + __ffs(static_cast<int>(left)) - 1;
        const Float4 value = load_quad<kAligned>(dx + row * cols, i, cols);
#pragma unroll
        for (int k = 0; k < 4; ++k) sum.v[k] += value.v[k];
      }
    __syncthreads();
  }
  if (i >= cols) return;
  float* to = dtable + mine * cols;
  const Float4 before = load_quad<kAligned>(to, i, cols);
#pragma unroll
  for (int k = 0; k < 4; ++k) sum.v[k] += before.v[k];
  store_quad<kAligned>(to, i, cols, sum);
}

// dpositions[t] += the sum over sequences, in their order: one array of length x cols elements.
template <class T>
struct AddSequences {
  float* dpositions;
  const T* dx;
  std::int64_t batch, size;
  template <bool kAligned>
  __device__ void quad(std::int64_t i, std::int64_t n) const {
    Float4 sum = load_quad<kAligned>(dpositions, i, n);
    for (std::int64_t b = 0; b < batch; ++b) {
      const Float4 value = load_quad<kAligned>(dx + b * size, i, n);
#pragma unroll
      for (int k = 0; k < 4; ++k) sum.v[k] += value.v[k];
    }
    store_quad<kAligned>(dpositions, i, n, sum);
  }
};

}  // namespace

template <class T>
void CudaElementOps<T>::embedding(T* x, const std::int32_t* tokens, const T* table, const T* positions,
                                  std::int64_t batch, std::int64_t length, std::int64_t cols, std::int64_t vocab) {
  const std::int64_t quads = batch * length * ((cols + 3) / 4);
  if (quads == 0) return;
  const bool aligned = all_aligned(x, table, positions) && cols % 4 == 0;
  launch("embedding", aligned ? embedding_kernel<T, true> : embedding_kernel<T, false>, blocks_for(quads, kQuadThreads),
         kQuadThreads, 0, context_.stream(),
         EmbeddingTask<T>{x, tokens, table, positions, length, cols, vocab, context_.faults()}, quads);
}

template <class T>
void CudaElementOps<T>::embedding_backward(float* dtable, float* dpositions, const std::int32_t* tokens, const T* dx,
                                           std::int64_t batch, std::int64_t length, std::int64_t cols) {
  const std::int64_t count = batch * length, size = length * cols;
  if (count == 0 || cols == 0) return;
  if (dtable) {
    const bool aligned = all_aligned(dtable, dx) && cols % 4 == 0;
    const dim3 grid(static_cast<unsigned>(count), blocks_for(cols, 4 * kThreads));
    launch("embedding_table", aligned ? embedding_table_kernel<T, true> : embedding_table_kernel<T, false>, grid,
           kThreads, 0, context_.stream(), dtable, tokens, dx, count, cols);
  }
  if (dpositions)
    launch_quads("embedding_positions", all_aligned(dpositions, dx) && size % 4 == 0,
                 AddSequences<T>{dpositions, dx, batch, size}, size, context_.stream());
}

template void CudaElementOps<float>::embedding(float*, const std::int32_t*, const float*, const float*, std::int64_t,
                                               std::int64_t, std::int64_t, std::int64_t);
template void CudaElementOps<float>::embedding_backward(float*, float*, const std::int32_t*, const float*, std::int64_t,
                                                        std::int64_t, std::int64_t);
template void CudaElementOps<Bf16>::embedding(Bf16*, const std::int32_t*, const Bf16*, const Bf16*, std::int64_t,
                                              std::int64_t, std::int64_t, std::int64_t);
template void CudaElementOps<Bf16>::embedding_backward(float*, float*, const std::int32_t*, const Bf16*, std::int64_t,
                                                       std::int64_t, std::int64_t);

}  // namespace regather::cuda
