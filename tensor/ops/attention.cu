// Causal attention in tiles, fp32; no T x T matrix. With H heads of size D: forward 2 H T^2 D flops (two products, half
// of each masked), backward 7 products, since two kernels recompute the scores: one for dq and one for dk and dv, so
// that every sum has one owner and one order. Bytes moved, a head: forward reads q once, and k and v once for each tile
// of queries that sees them, 4 T D (T / 64 + 1) bytes in all (mostly from the cache), writes 4 T D; the kernel for dq
// reads dy in addition, that for dk and dv reads q and dy where the others read k and v. Limiter: fp32 arithmetic out
// of shared memory (no tensor cores). Scores are in units of log 2.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "tensor/cuda/cuda_ops.h"
#include "tensor/cuda/math.cuh"
#include "tensor/cuda/quads.cuh"
#include "tensor/cuda/reduce.cuh"

namespace regather::cuda {
namespace {

constexpr float kLog2e = 1.44269504088896341F, kLn2 = 0.69314718055994531F;
// 16 x 16 threads; thread (y, x) has rows y, y + 16, ... and columns x, x + 16, ... of a product.
constexpr int kSide = 16, kThreads = kSide * kSide;

struct Task {
  const float* qkv;
  std::int64_t batch, tokens, heads, kv_heads, d;
  std::int64_t stride, y_stride;  // of a token, in qkv and in y
  float scale;
  DeviceMask mask;
  float *y, *lse;         // written by forward
  float *dqkv, *delta;    // written by backward
  const float *out, *dy;  // y and its gradient
  std::int64_t first_batch;

  __device__ std::int64_t row_of(std::int64_t b, std::int64_t part) const { return b * tokens * stride + part * d; }
};

// A tile of kRows tokens in shared memory, padded to kD columns with zeros and by one so that columns do not collide.
template <int kD, int kRows>
struct Tile {
  float v[kRows][kD + 1];
};
template <bool kAligned, int kD, int kRows>
__device__ void load_tile(Tile<kD, kRows>& tile, const float* from, std::int64_t first, std::int64_t tokens,
                          std::int64_t stride, std::int64_t d, float factor) {
  constexpr int kQuads = kD / 4;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kQuads; i += kThreads) {
    const int row = i / kQuads, col = i % kQuads * 4;
    Float4 value{};
    if (first + row < tokens && col < d) value = load_quad<kAligned>(from + (first + row) * stride, col, d);
#pragma unroll
    for (int k = 0; k < 4; ++k) tile.v[row][col + k] = value.v[k] * factor;
  }
}

template <int kRows, int kCols>
struct Block {  // a thread's elements of a product
  float v[kRows][kCols];
};

// c[i][j] += sum over e of a[y + 16 i][e] b[x + 16 j][e].
template <int kDepth, int kN, class A, class B>
__device__ __forceinline__ void add_rows_by_rows(Block<kN, kN>& c, const A& a, const B& b, int y, int x) {
#pragma unroll 4
  for (int e = 0; e < kDepth; ++e) {
    float left[kN], right[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) left[i] = a.v[y + kSide * i][e];
#pragma unroll
    for (int j = 0; j < kN; ++j) right[j] = b.v[x + kSide * j][e];
#pragma unroll
    for (int i = 0; i < kN; ++i)
#pragma unroll
      for (int j = 0; j < kN; ++j) c.v[i][j] += left[i] * right[j];
  }
}
// c[i][j] += sum over s of a(y + 16 i, s) b[s][x + 16 j]; a is a tile of scores, or its transpose.
template <bool kTransposed, int kDepth, int kRows, int kCols, class A, class B>
__device__ __forceinline__ void add_scores_by_rows(Block<kRows, kCols>& c, const A& a, const B& b, int y, int x) {
#pragma unroll 2
  for (int s = 0; s < kDepth; ++s) {
    float left[kRows], right[kCols];
#pragma unroll
    for (int i = 0; i < kRows; ++i) left[i] = kTransposed ? a.v[s][y + kSide * i] : a.v[y + kSide * i][s];
#pragma unroll
    for (int j = 0; j < kCols; ++j) right[j] = b.v[s][x + kSide * j];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kCols; ++j) c.v[i][j] += left[i] * right[j];
  }
}
template <int kRows, int kCols>
__device__ void store_block(float* to, const Block<kRows, kCols>& c, std::int64_t first, std::int64_t tokens,
                            std::int64_t stride, std::int64_t d, int y, int x, float factor) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      const std::int64_t row = first + y + kSide * i, col = x + kSide * j;
      if (row < tokens && col < d) store(to + row * stride + col, c.v[i][j] * factor);
    }
}

// Over the 16 threads that share rows.
template <class F>
__device__ __forceinline__ float reduce_row(float value, F f) {
#pragma unroll
  for (int bits = kSide / 2; bits > 0; bits /= 2) value = f(value, __shfl_xor_sync(kAllLanes, value, bits));
  return value;
}

// ---- forward --------------------------------------------------------------------------------------------------------

template <int kD, int kT>
struct ForwardShared {
  Tile<kD, kT> q, kv;
  Tile<kT, kT> p;
};

template <int kD, int kT, bool kAligned>
__global__ void __launch_bounds__(kThreads, kD <= 64 ? 2 : 1) attention_kernel(Task a) {
  constexpr int kN = kT / kSide, kC = kD / kSide;
  auto& s = *dynamic_shared<ForwardShared<kD, kT>>();
  const int x = static_cast<int>(threadIdx.x) % kSide, y = static_cast<int>(threadIdx.x) / kSide;
  const std::int64_t q0 = static_cast<std::int64_t>(gridDim.x - 1 - blockIdx.x) * kT, head = blockIdx.y, b = blockIdx.z;
  const std::int64_t kv = head / (a.heads / a.kv_heads);
  const float *k = a.qkv + a.row_of(b, a.heads + kv), *v = a.qkv + a.row_of(b, a.heads + a.kv_heads + kv);
  load_tile<kAligned>(s.q, a.qkv + a.row_of(b, head), q0, a.tokens, a.stride, a.d, a.scale * kLog2e);
  Block<kN, kC> out{};
  float top[kN], total[kN];
#pragma unroll
  for (int i = 0; i < kN; ++i) top[i] = -INFINITY, total[i] = 0;
  for (std::int64_t k0 = 0; k0 <= q0; k0 += kT) {
    __syncthreads();
    load_tile<kAligned>(s.kv, k, k0, a.tokens, a.stride, a.d, 1.0F);
    __syncthreads();
    Block<kN, kN> p{};
    add_rows_by_rows<kD>(p, s.q, s.kv, y, x);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const std::int64_t row = q0 + y + kSide * i;
      float highest = -INFINITY;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        if (k0 + x + kSide * j > row) p.v[i][j] = -INFINITY;
        highest = fmaxf(highest, p.v[i][j]);
      }
      highest = fmaxf(top[i], reduce_row(highest, Max{}));
      const float before = exp2f(top[i] - highest);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        p.v[i][j] = exp2f(p.v[i][j] - highest);
        sum += p.v[i][j];
      }
      total[i] = total[i] * before + reduce_row(sum, Sum{});
      top[i] = highest;
#pragma unroll
      for (int j = 0; j < kC; ++j) out.v[i][j] *= before;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        float value = p.v[i][j];
        const std::int64_t col = k0 + x + kSide * j;
        if (a.mask.threshold != 0 && col <= row)
          value *= a.mask.factor(static_cast<std::uint64_t>(b),
                                 static_cast<std::uint64_t>((head * a.tokens + row) * a.tokens + col));
        s.p.v[y + kSide * i][x + kSide * j] = value;
      }
    }
    __syncthreads();
    load_tile<kAligned>(s.kv, v, k0, a.tokens, a.stride, a.d, 1.0F);
    __syncthreads();
    add_scores_by_rows<false, kT>(out, s.p, s.kv, y, x);
  }
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const std::int64_t row = q0 + y + kSide * i;
    const float inverse = 1.0F / total[i];
#pragma unroll
    for (int j = 0; j < kC; ++j) out.v[i][j] *= inverse;
    if (x == 0 && row < a.tokens) store(a.lse + (b * a.heads + head) * a.tokens + row, top[i] * kLn2 + logf(total[i]));
  }
  store_block(a.y + b * a.tokens * a.y_stride + head * a.d, out, q0, a.tokens, a.y_stride, a.d, y, x, 1.0F);
}

// ---- backward -------------------------------------------------------------------------------------------------------

// delta = dy . y of each row: a warp a row.
constexpr int kDeltaThreads = 128;
__global__ void __launch_bounds__(kDeltaThreads) attention_delta_kernel(Task a, std::int64_t rows) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kDeltaThreads / 32) + threadIdx.x / 32;
  if (row >= rows) return;  // a whole warp
  const std::int64_t t = row % a.tokens, head = row / a.tokens % a.heads, b = row / a.tokens / a.heads + a.first_batch;
  const std::int64_t at = (b * a.tokens + t) * a.y_stride + head * a.d;
  float sum = 0;
  for (std::int64_t c = threadIdx.x % 32; c < a.d; c += 32) sum += load(a.out + at + c) * load(a.dy + at + c);
  sum = reduce_warp(sum, Sum{});
  if (threadIdx.x % 32 == 0) store(a.delta + row, sum);
}

template <int kD, int kT>
struct BackwardShared {
  Tile<kD, kT> q, k, v, dy;
  Tile<kT, kT> p;
  float lse[kT], delta[kT];
};

template <int kD, int kT>
__device__ void load_row_values(BackwardShared<kD, kT>& s, const Task& a, std::int64_t b, std::int64_t head,
                                std::int64_t q0) {
  if (threadIdx.x >= kT) return;
  const std::int64_t row = q0 + threadIdx.x;
  const bool in = row < a.tokens;
  s.lse[threadIdx.x] = in ? load(a.lse + (b * a.heads + head) * a.tokens + row) * kLog2e : INFINITY;  // padding: P = 0
  s.delta[threadIdx.x] = in ? load(a.delta + ((b - a.first_batch) * a.heads + head) * a.tokens + row) : 0.0F;
}

// P (with dropout) and dS of the thread's elements of the tile of queries q0 and keys k0.
template <int kD, int kT>
__device__ __forceinline__ void gradient_of_scores(const BackwardShared<kD, kT>& s, const Task& a, std::int64_t b,
                                                   std::int64_t head, std::int64_t q0, std::int64_t k0, int y, int x,
                                                   Block<kT / kSide, kT / kSide>& p,
                                                   Block<kT / kSide, kT / kSide>& ds) {
  constexpr int kN = kT / kSide;
  add_rows_by_rows<kD>(p, s.q, s.k, y, x);
  add_rows_by_rows<kD>(ds, s.dy, s.v, y, x);
#pragma unroll
  for (int i = 0; i < kN; ++i)
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const std::int64_t row = q0 + y + kSide * i, col = k0 + x + kSide * j;
      const float score = col <= row ? p.v[i][j] * (a.scale * kLog2e) : -INFINITY;
      const float probability = exp2f(score - s.lse[y + kSide * i]);
      float factor = 1.0F;
      if (a.mask.threshold != 0 && col <= row)
        factor = a.mask.factor(static_cast<std::uint64_t>(b),
                               static_cast<std::uint64_t>((head * a.tokens + row) * a.tokens + col));
      ds.v[i][j] = probability * (ds.v[i][j] * factor - s.delta[y + kSide * i]);
      p.v[i][j] = probability * factor;
    }
}
template <int kT>
__device__ __forceinline__ void share(Tile<kT, kT>& tile, const Block<kT / kSide, kT / kSide>& c, int y, int x) {
#pragma unroll
  for (int i = 0; i < kT / kSide; ++i)
#pragma unroll
    for (int j = 0; j < kT / kSide; ++j) tile.v[y + kSide * i][x + kSide * j] = c.v[i][j];
}

template <int kD, int kT, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1) attention_dq_kernel(Task a) {
  constexpr int kN = kT / kSide, kC = kD / kSide;
  auto& s = *dynamic_shared<BackwardShared<kD, kT>>();
  const int x = static_cast<int>(threadIdx.x) % kSide, y = static_cast<int>(threadIdx.x) / kSide;
  const std::int64_t q0 = static_cast<std::int64_t>(gridDim.x - 1 - blockIdx.x) * kT, head = blockIdx.y,
                     b = a.first_batch + blockIdx.z, kv = head / (a.heads / a.kv_heads);
  load_tile<kAligned>(s.q, a.qkv + a.row_of(b, head), q0, a.tokens, a.stride, a.d, 1.0F);
  load_tile<kAligned>(s.dy, a.dy + b * a.tokens * a.y_stride + head * a.d, q0, a.tokens, a.y_stride, a.d, 1.0F);
  load_row_values(s, a, b, head, q0);
  Block<kN, kC> dq{};
  for (std::int64_t k0 = 0; k0 <= q0; k0 += kT) {
    __syncthreads();
    load_tile<kAligned>(s.k, a.qkv + a.row_of(b, a.heads + kv), k0, a.tokens, a.stride, a.d, 1.0F);
    load_tile<kAligned>(s.v, a.qkv + a.row_of(b, a.heads + a.kv_heads + kv), k0, a.tokens, a.stride, a.d, 1.0F);
    __syncthreads();
    Block<kN, kN> p{}, ds{};
    gradient_of_scores(s, a, b, head, q0, k0, y, x, p, ds);
    share(s.p, ds, y, x);
    __syncthreads();
    add_scores_by_rows<false, kT>(dq, s.p, s.k, y, x);
  }
  store_block(a.dqkv + a.row_of(b, head), dq, q0, a.tokens, a.stride, a.d, y, x, a.scale);
}

template <int kD, int kT, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1) attention_dkv_kernel(Task a) {
  constexpr int kN = kT / kSide, kC = kD / kSide;
  auto& s = *dynamic_shared<BackwardShared<kD, kT>>();
  const int x = static_cast<int>(threadIdx.x) % kSide, y = static_cast<int>(threadIdx.x) / kSide;
  const std::int64_t k0 = static_cast<std::int64_t>(blockIdx.x) * kT, kv = blockIdx.y, b = a.first_batch + blockIdx.z,
                     group = a.heads / a.kv_heads;
  load_tile<kAligned>(s.k, a.qkv + a.row_of(b, a.heads + kv), k0, a.tokens, a.stride, a.d, 1.0F);
  load_tile<kAligned>(s.v, a.qkv + a.row_of(b, a.heads + a.kv_heads + kv), k0, a.tokens, a.stride, a.d, 1.0F);
  Block<kN, kC> dk{}, dv{};
  for (std::int64_t head = kv * group; head < (kv + 1) * group; ++head)
    for (std::int64_t q0 = k0; q0 < a.tokens; q0 += kT) {
      __syncthreads();
      load_tile<kAligned>(s.q, a.qkv + a.row_of(b, head), q0, a.tokens, a.stride, a.d, 1.0F);
      load_tile<kAligned>(s.dy, a.dy + b * a.tokens * a.y_stride + head * a.d, q0, a.tokens, a.y_stride, a.d, 1.0F);
      load_row_values(s, a, b, head, q0);
      __syncthreads();
      Block<kN, kN> p{}, ds{};
      gradient_of_scores(s, a, b, head, q0, k0, y, x, p, ds);
      share(s.p, p, y, x);
      __syncthreads();
      add_scores_by_rows<true, kT>(dv, s.p, s.dy, y, x);
      __syncthreads();
      share(s.p, ds, y, x);
      __syncthreads();
      add_scores_by_rows<true, kT>(dk, s.p, s.q, y, x);
    }
  store_block(a.dqkv + a.row_of(b, a.heads + kv), dk, k0, a.tokens, a.stride, a.d, y, x, a.scale);
  store_block(a.dqkv + a.row_of(b, a.heads + a.kv_heads + kv), dv, k0, a.tokens, a.stride, a.d, y, x, 1.0F);
}

// ---- launching ------------------------------------------------------------------------------------------------------

Task task_of(const float* qkv, const AttentionSizes& z, const RandomMask& mask) {
  Task a{};
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

template <class Shared>
void launch_tiles(const char* name, void (*kernel)(Task), dim3 grid, const Task& a, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared);
  if (grid.x == 0 || grid.z == 0) return;
  check_status(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
      "cudaFuncSetAttribute");
  launch(name, kernel, grid, kThreads, kBytes, stream, a);
}

// f(padded head size, rows of a tile) as compile-time constants: as much as fits the shared memory of sm_80.
template <class F>
void with_tiles(std::int64_t d, F f) {
  require_at_most("elements of an attention head", d, 256);
  if (d <= 32) return f(std::integral_constant<int, 32>{}, std::integral_constant<int, 64>{});
  if (d <= 64) return f(std::integral_constant<int, 64>{}, std::integral_constant<int, 64>{});
  if (d <= 128) return f(std::integral_constant<int, 128>{}, std::integral_constant<int, 64>{});
  f(std::integral_constant<int, 256>{}, std::integral_constant<int, 32>{});
}

dim3 grid_of(std::int64_t tokens, int tile, std::int64_t heads, std::int64_t batch) {
  return dim3(blocks_for(tokens, tile), static_cast<unsigned>(heads), static_cast<unsigned>(batch));
}

}  // namespace

void CudaOps::attention(float* y, float* lse, const float* qkv, const AttentionSizes& sizes, const RandomMask& mask) {
  Task a = task_of(qkv, sizes, mask);
  a.y = y;
  a.lse = lse;
  const bool aligned = all_aligned(qkv) && a.d % 4 == 0;
  with_tiles(a.d, [&](auto padded, auto rows) {
    constexpr int kD = decltype(padded)::value, kT = decltype(rows)::value;
    launch_tiles<ForwardShared<kD, kT>>("attention",
                                        aligned ? attention_kernel<kD, kT, true> : attention_kernel<kD, kT, false>,
                                        grid_of(a.tokens, kT, a.heads, a.batch), a, stream_);
  });
}

void CudaOps::attention_backward(float* dqkv, const float* qkv, const float* y, const float* lse, const float* dy,
                                 const AttentionSizes& sizes, const RandomMask& mask) {
  Task a = task_of(qkv, sizes, mask);
  a.dqkv = dqkv;
  a.out = y;
  a.lse = const_cast<float*>(lse);  // only read here
  a.dy = dy;
  const bool aligned = all_aligned(qkv, dy) && a.d % 4 == 0;
  const std::int64_t each = a.heads * a.tokens;  // deltas of a sequence
  if (each == 0) return;
  const std::int64_t most = room_for<float>(each);
  for (a.first_batch = 0; a.first_batch < a.batch; a.first_batch += most) {
    const std::int64_t batch = std::min(most, a.batch - a.first_batch), rows = batch * each;
    a.delta = scratch<float>(rows);
    launch("attention_delta", attention_delta_kernel, blocks_for(rows, kDeltaThreads / 32), kDeltaThreads, 0, stream_,
           a, rows);
    with_tiles(a.d, [&](auto padded, auto tile) {
      constexpr int kD = decltype(padded)::value, kT = decltype(tile)::value;
      using Shared = BackwardShared<kD, kT>;
      launch_tiles<Shared>("attention_dq",
                           aligned ? attention_dq_kernel<kD, kT, true> : attention_dq_kernel<kD, kT, false>,
                           grid_of(a.tokens, kT, a.heads, batch), a, stream_);
      launch_tiles<Shared>("attention_dkv",
                           aligned ? attention_dkv_kernel<kD, kT, true> : attention_dkv_kernel<kD, kT, false>,
                           grid_of(a.tokens, kT, a.kv_heads, batch), a, stream_);
    });
  }
}

}  // namespace regather::cuda
