// Causal attention in tiles, fp32. Bytes moved, a head: forward reads q once, and k and v once for each tile of queries
// that sees them, 4 T D (T / 64 + 1) bytes in all (mostly from the cache), writes 4 T D; the kernel for dq reads dy in
// addition, that for dk and dv reads q and dy where the others read k and v. Wide heads have smaller
// tiles (with_tiles) and so read more often. Flops as in attention.cu. Limiter: fp32 arithmetic out of shared memory
// (no tensor cores). Scores are in units of log 2.
#include <type_traits>

#include "tensor/cuda/attention.cuh"
#include "tensor/cuda/reduce.cuh"

namespace regather::cuda {
namespace {

// 16 x 16 threads; thread (y, x) has rows y, y + 16, ... and columns x, x + 16, ... of a product.
constexpr int kSide = 16, kThreads = kSide * kSide;

using Task = AttentionTask<float>;

// A tile of kRows tokens in shared memory, padded to kD columns with zeros and by one so that columns do not collide.
template <int kD, int kRows>
struct Tile {
  float v[kRows][kD + 1];
};
template <int kD, int kRows>
__device__ void load_tile(Tile<kD, kRows>& tile, const Task& a, const float* from, std::int64_t first,
                          std::int64_t stride, float factor) {
  constexpr int kQuads = kD / 4;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kQuads; i += kThreads) {
    const int row = i / kQuads, col = i % kQuads * 4;
    Float4 value{};
    if (first + row < a.tokens && col < a.d) {
      const float* at = from + (first + row) * stride;
      value = a.aligned ? load_quad<true>(at, col, a.d) : load_quad<false>(at, col, a.d);
    }
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

// ---- forward --------------------------------------------------------------------------------------------------------

template <int kD, int kT>
struct ForwardShared {
  Tile<kD, kT> q, kv;
  Tile<kT, kT> p;
};

template <int kD, int kT>
__global__ void __launch_bounds__(kThreads, kD <= 64 ? 2 : 1) attention_kernel(Task a) {
  constexpr int kN = kT / kSide, kC = kD / kSide;
  auto& s = *dynamic_shared<ForwardShared<kD, kT>>();
  const int x = static_cast<int>(threadIdx.x) % kSide, y = static_cast<int>(threadIdx.x) / kSide;
  const std::int64_t q0 = static_cast<std::int64_t>(gridDim.x - 1 - blockIdx.x) * kT, head = blockIdx.y, b = blockIdx.z;
  const std::int64_t kv = head / (a.heads / a.kv_heads);
  const float *k = a.qkv + a.row_of(b, a.heads + kv), *v = a.qkv + a.row_of(b, a.heads + a.kv_heads + kv);
  load_tile(s.q, a, a.qkv + a.row_of(b, head), q0, a.stride, a.scale * kLog2e);
  Block<kN, kC> out{};
  float top[kN], total[kN];
#pragma unroll
  for (int i = 0; i < kN; ++i) top[i] = -INFINITY, total[i] = 0;
  for (std::int64_t k0 = 0; k0 <= q0; k0 += kT) {
    __syncthreads();
    load_tile(s.kv, a, k, k0, a.stride, 1.0F);
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
      highest = fmaxf(top[i], reduce_warp<kSide>(highest, Max{}));
      const float before = exp2f(top[i] - highest);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        p.v[i][j] = exp2f(p.v[i][j] - highest);
        sum += p.v[i][j];
      }
      total[i] = total[i] * before + reduce_warp<kSide>(sum, Sum{});
      top[i] = highest;
#pragma unroll
      for (int j = 0; j < kC; ++j) out.v[i][j] *= before;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        s.p.v[y + kSide * i][x + kSide * j] = p.v[i][j] * a.factor(b, head, row, k0 + x + kSide * j);
      }
    }
    __syncthreads();
    load_tile(s.kv, a, v, k0, a.stride, 1.0F);
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
      const float factor = a.factor(b, head, row, col);
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

template <int kD, int kT>
__global__ void __launch_bounds__(kThreads, 1) attention_dq_kernel(Task a) {
  constexpr int kN = kT / kSide, kC = kD / kSide;
  auto& s = *dynamic_shared<BackwardShared<kD, kT>>();
  const int x = static_cast<int>(threadIdx.x) % kSide, y = static_cast<int>(threadIdx.x) / kSide;
  const std::int64_t q0 = static_cast<std::int64_t>(gridDim.x - 1 - blockIdx.x) * kT, head = blockIdx.y,
                     b = a.first_batch + blockIdx.z, kv = head / (a.heads / a.kv_heads);
  load_tile(s.q, a, a.qkv + a.row_of(b, head), q0, a.stride, 1.0F);
  load_tile(s.dy, a, a.dy + b * a.tokens * a.y_stride + head * a.d, q0, a.y_stride, 1.0F);
  load_row_values(s, a, b, head, q0);
  Block<kN, kC> dq{};
  for (std::int64_t k0 = 0; k0 <= q0; k0 += kT) {
    __syncthreads();
    load_tile(s.k, a, a.qkv + a.row_of(b, a.heads + kv), k0, a.stride, 1.0F);
    load_tile(s.v, a, a.qkv + a.row_of(b, a.heads + a.kv_heads + kv), k0, a.stride, 1.0F);
    __syncthreads();
    Block<kN, kN> p{}, ds{};
    gradient_of_scores(s, a, b, head, q0, k0, y, x, p, ds);
    share(s.p, ds, y, x);
    __syncthreads();
    add_scores_by_rows<false, kT>(dq, s.p, s.k, y, x);
  }
  store_block(a.dqkv + a.row_of(b, head), dq, q0, a.tokens, a.stride, a.d, y, x, a.scale);
}

template <int kD, int kT>
__global__ void __launch_bounds__(kThreads, 1) attention_dkv_kernel(Task a) {
  constexpr int kN = kT / kSide, kC = kD / kSide;
  auto& s = *dynamic_shared<BackwardShared<kD, kT>>();
  const int x = static_cast<int>(threadIdx.x) % kSide, y = static_cast<int>(threadIdx.x) / kSide;
  const std::int64_t k0 = static_cast<std::int64_t>(blockIdx.x) * kT, kv = blockIdx.y, b = a.first_batch + blockIdx.z,
                     group = a.heads / a.kv_heads;
  load_tile(s.k, a, a.qkv + a.row_of(b, a.heads + kv), k0, a.stride, 1.0F);
  load_tile(s.v, a, a.qkv + a.row_of(b, a.heads + a.kv_heads + kv), k0, a.stride, 1.0F);
  Block<kN, kC> dk{}, dv{};
  for (std::int64_t head = kv * group; head < (kv + 1) * group; ++head)
    for (std::int64_t q0 = k0; q0 < a.tokens; q0 += kT) {
      __syncthreads();
      load_tile(s.q, a, a.qkv + a.row_of(b, head), q0, a.stride, 1.0F);
      load_tile(s.dy, a, a.dy + b * a.tokens * a.y_stride + head * a.d, q0, a.y_stride, 1.0F);
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

template <int kN>
using Constant = std::integral_constant<int, kN>;
// f(padded head size, rows of a tile forward, backward) as compile-time constants: what fits the shared memory.
template <class F>
void with_tiles(std::int64_t d, F f) {
  if (d <= 32) return f(Constant<32>{}, Constant<64>{}, Constant<64>{});
  if (d <= 64) return f(Constant<64>{}, Constant<64>{}, Constant<64>{});
  if (d <= 128) return f(Constant<128>{}, Constant<64>{}, Constant<32>{});
  f(Constant<256>{}, Constant<32>{}, Constant<16>{});
}

}  // namespace

void launch_attention(const AttentionTask<float>& a, cudaStream_t stream) {
  with_tiles(a.d, [&](auto padded, auto rows, auto) {
    constexpr int kD = decltype(padded)::value, kT = decltype(rows)::value;
    launch_tiles<ForwardShared<kD, kT>>("attention", attention_kernel<kD, kT>, grid_of(a.tokens, kT, a.heads, a.batch),
                                        kThreads, a, stream);
  });
}

void launch_attention_backward(const AttentionTask<float>& a, std::int64_t batch, cudaStream_t stream) {
  with_tiles(a.d, [&](auto padded, auto, auto rows) {
    constexpr int kD = decltype(padded)::value, kT = decltype(rows)::value;
    using Shared = BackwardShared<kD, kT>;
    launch_tiles<Shared>("attention_dq", attention_dq_kernel<kD, kT>, grid_of(a.tokens, kT, a.heads, batch), kThreads,
                         a, stream);
    launch_tiles<Shared>("attention_dkv", attention_dkv_kernel<kD, kT>, grid_of(a.tokens, kT, a.kv_heads, batch),
                         kThreads, a, stream);
  });
}

}  // namespace regather::cuda
