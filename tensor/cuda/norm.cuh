// What layer_norm and rms_norm share: one block a row, the row in registers. kCentred: the mean is subtracted.
// Forward reads x once and writes y; gain and bias come from the cache. Backward reads x and dy once and writes dx; a
// block does a chunk of rows and keeps its columns' sums for dgain and dbias in registers, then writes them as partial
// sums, which add_partial_sums adds up. The order of additions follows from the sizes.
#pragma once
#include <algorithm>
#include <type_traits>

#include "tensor/cuda/cuda_ops.h"
#include "tensor/cuda/quads.cuh"
#include "tensor/cuda/reduce.cuh"

namespace regather::cuda {

constexpr int kNormThreads = 256, kMostQuads = 8;  // quads of a row that one thread holds
constexpr std::int64_t kMostNormColumns = std::int64_t{4} * kNormThreads * kMostQuads;

// A thread's part of a row: quads threadIdx.x, threadIdx.x + blockDim.x, ...
template <int kQuads>
struct RowPart {
  Float4 q[kQuads];
};
__device__ __forceinline__ std::int64_t quad_begin(int k) {
  return 4 * (static_cast<std::int64_t>(k) * blockDim.x + threadIdx.x);
}
template <bool kAligned, int kQuads, class T>
__device__ __forceinline__ RowPart<kQuads> load_row(const T* row, std::int64_t cols) {
  RowPart<kQuads> part;
#pragma unroll
  for (int k = 0; k < kQuads; ++k) part.q[k] = load_quad<kAligned>(row, quad_begin(k), cols);
  return part;
}

struct Moments {
  float mean, rstd;
};
template <bool kCentred, int kQuads>
__device__ __forceinline__ Moments moments(const RowPart<kQuads>& x, std::int64_t cols, float eps,
                                           Partials<float, 1>& shared) {
  float sum[1] = {0}, squares[1] = {0};
  if constexpr (kCentred) {
#pragma unroll
    for (int k = 0; k < kQuads; ++k)
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[0] += x.q[k].v[j];
    reduce_block(sum, shared, Sum{});
  }
  const float mean = sum[0] / static_cast<float>(cols);
#pragma unroll
  for (int k = 0; k < kQuads; ++k)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float d = quad_begin(k) + j < cols ? x.q[k].v[j] - mean : 0.0F;
      squares[0] += d * d;
    }
  reduce_block(squares, shared, Sum{});
  return {mean, 1.0F / sqrtf(squares[0] / static_cast<float>(cols) + eps)};
}

template <bool kCentred, bool kAligned, int kQuads, class T>
__global__ void __launch_bounds__(kNormThreads)
    norm_kernel(T* y, const T* x, const T* gain, const T* bias, std::int64_t cols, float eps) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * cols;
  const RowPart<kQuads> row = load_row<kAligned, kQuads>(x + at, cols);
  const Moments m = moments<kCentred>(row, cols, eps, block_shared<Partials<float, 1>>());
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    const std::int64_t i = quad_begin(k);
    const Float4 g = load_quad<kAligned>(gain, i, cols);
    const Float4 b = kCentred ? load_quad<kAligned>(bias, i, cols) : Float4{};
    Float4 out;
#pragma unroll
    for (int j = 0; j < 4; ++j) out.v[j] = (row.q[k].v[j] - m.mean) * m.rstd * g.v[j] + b.v[j];
    store_quad<kAligned>(y + at, i, cols, out);
  }
}

template <class T>
struct NormBackward {
  T* dx;
  float* partial;  // [chunks, 2, cols], dgain's and dbias's sums
  const T *x, *gain, *dy;
  std::int64_t rows, cols, chunk;
  float eps;
  bool wants_gain, wants_bias;
};
struct NormShared {
  Partials<float, 1> one;
  Partials<float, 2> two;
};
template <bool kCentred, bool kAligned, int kQuads, class T>
__global__ void __launch_bounds__(kNormThreads, 1) norm_backward_kernel(NormBackward<T> a) {
  auto& shared = block_shared<NormShared>();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * a.chunk, end = min(a.rows, first + a.chunk);
  const bool reads_x = a.dx || a.wants_gain;
  RowPart<kQuads> dgain{}, dbias{};
  for (std::int64_t r = first; r < end; ++r) {
    const std::int64_t at = r * a.cols;
    const RowPart<kQuads> d = load_row<kAligned, kQuads>(a.dy + at, a.cols);
    RowPart<kQuads> h{};  // the normalised row
    Moments m{};
    if (reads_x) {
      h = load_row<kAligned, kQuads>(a.x + at, a.cols);
      m = moments<kCentred>(h, a.cols, a.eps, shared.one);
    }
    float sums[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
      const Float4 g = a.dx ? load_quad<kAligned>(a.gain, quad_begin(k), a.cols) : Float4{};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        h.q[k].v[j] = (h.q[k].v[j] - m.mean) * m.rstd;
        const float e = d.q[k].v[j] * g.v[j];  // zero past the end of the row
        sums[0] += e;
        sums[1] += e * h.q[k].v[j];
        dgain.q[k].v[j] += d.q[k].v[j] * h.q[k].v[j];
        dbias.q[k].v[j] += d.q[k].v[j];
      }
    }
    if (!a.dx) continue;
    reduce_block(sums, shared.two, Sum{});
    const float s0 = kCentred ? sums[0] / static_cast<float>(a.cols) : 0.0F, s1 = sums[1] / static_cast<float>(a.cols);
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
      const Float4 g = load_quad<kAligned>(a.gain, quad_begin(k), a.cols);
      Float4 out;
#pragma unroll
      for (int j = 0; j < 4; ++j) out.v[j] = m.rstd * (d.q[k].v[j] * g.v[j] - s0 - h.q[k].v[j] * s1);
      store_quad<kAligned>(a.dx + at, quad_begin(k), a.cols, out);
    }
  }
  float* partial = a.partial + static_cast<std::int64_t>(blockIdx.x) * 2 * a.cols;
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    if (a.wants_gain) store_quad<kAligned>(partial, quad_begin(k), a.cols, dgain.q[k]);
    if (a.wants_bias) store_quad<kAligned>(partial + a.cols, quad_begin(k), a.cols, dbias.q[k]);
  }
}

// f(threads, whether rows are read in quads, quads that a thread holds), the last two as compile-time constants. Rows
// that begin anywhere are read by the kernel of the longest rows, so that there is one of those: quads past the end of
// a row are zero and change no sum.
template <class F>
void with_row_split(bool aligned, std::int64_t cols, F f) {
  require_at_most("channels of a norm", cols, kMostNormColumns);
  const std::int64_t quads = (cols + 3) / 4, threads = std::min<std::int64_t>(kNormThreads, (quads + 31) / 32 * 32);
  const std::int64_t each = (quads + threads - 1) / threads;
  const auto block = static_cast<unsigned>(threads);
  if (!aligned) return f(block, std::false_type{}, std::integral_constant<int, kMostQuads>{});
  if (each <= 1) return f(block, std::true_type{}, std::integral_constant<int, 1>{});
  if (each <= 2) return f(block, std::true_type{}, std::integral_constant<int, 2>{});
  if (each <= 4) return f(block, std::true_type{}, std::integral_constant<int, 4>{});
  f(block, std::true_type{}, std::integral_constant<int, kMostQuads>{});
}

template <bool kCentred, class T>
void norm(const OpContext& context, T* y, const T* x, const T* gain, const T* bias, std::int64_t rows,
          std::int64_t cols, float eps) {
  if (rows == 0 || cols == 0) return;
  with_row_split(all_aligned(y, x, gain, bias) && cols % 4 == 0, cols, [&](unsigned threads, auto aligned, auto quads) {
    constexpr bool kAligned = decltype(aligned)::value;
    constexpr int kQuads = decltype(quads)::value;
    launch(kCentred ? "layer_norm" : "rms_norm", norm_kernel<kCentred, kAligned, kQuads, T>,
           static_cast<unsigned>(rows), threads, 0, context.stream(), y, x, gain, bias, cols, eps);
  });
}

template <bool kCentred, class T>
void norm_backward(OpContext& context, T* dx, float* dgain, float* dbias, const T* x, const T* gain, const T* dy,
                   std::int64_t rows, std::int64_t cols, float eps) {
  if (rows == 0 || cols == 0 || (!dx && !dgain && !dbias)) return;
  constexpr std::int64_t kMostChunks = 256;
  const std::int64_t chunks = std::min(rows, kMostChunks);
  const NormBackward<T> task = {.dx = dx,
                                .partial = context.scratch<float>(chunks * 2 * cols),
                                .x = x,
                                .gain = gain,
                                .dy = dy,
                                .rows = rows,
                                .cols = cols,
                                .chunk = (rows + chunks - 1) / chunks,
                                .eps = eps,
                                .wants_gain = dgain != nullptr,
                                .wants_bias = dbias != nullptr};
  with_row_split(all_aligned(dx, x, gain, dy) && cols % 4 == 0, cols, [&](unsigned threads, auto aligned, auto quads) {
    constexpr bool kAligned = decltype(aligned)::value;
    constexpr int kQuads = decltype(quads)::value;
    launch(kCentred ? "layer_norm_backward" : "rms_norm_backward", norm_backward_kernel<kCentred, kAligned, kQuads, T>,
           static_cast<unsigned>(chunks), threads, 0, context.stream(), task);
  });
  if (dgain) context.add_partial_sums(dgain, task.partial, chunks, cols, 2 * cols);
  if (dbias) context.add_partial_sums(dbias, task.partial + cols, chunks, cols, 2 * cols);
}

}  // namespace regather::cuda
