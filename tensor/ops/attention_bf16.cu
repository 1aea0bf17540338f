// Causal attention in tiles, bf16 on tensor cores, sums in fp32. A warp owns 16 rows of a tile of 64: queries in
// forward and for dq, keys for dk and dv, where the scores are made transposed. So the scores that one product leaves
// in a warp's registers are the left factor of the next; they are rounded to bf16 in between (P and dS; the softmax's
// sums take them unrounded), and no two warps add to one sum. Bytes moved, a head: forward reads q once, and k and v
// once for each tile of queries that sees them, 2 T D (T / 64 + 1) bytes in all (mostly from the cache), writes 2 T D;
// the kernel for dq reads dy in addition, that for dk and dv reads q and dy where the others read k and v, and twice
// for heads of more than 128 elements, whose columns are split. Flops as in attention.cu. Limiter: tensor cores, and
// loads that only other blocks of the processor hide: tiles are not fetched ahead. Scores are in units of log 2.
#include <type_traits>

#include "tensor/cuda/attention.cuh"
#include "tensor/cuda/reduce.cuh"

namespace regather::cuda {
namespace {

using Task = AttentionTask<Bf16>;
constexpr int kWarps = 4, kThreads = 32 * kWarps, kRows = 16 * kWarps;
constexpr int kSharers = 4;  // neighbouring threads that share rows

// kN tokens in shared memory, padded to kD columns with zeros; rows begin 16 bytes further in a line than the row
// before (kD is a multiple of 64), so that eight of them do not collide.
using Chunk = Pack<Bf16, 8>;
template <int kD, int kN>
struct Tile {
  alignas(16) Bf16 v[kN][kD + 8];
};
template <int kD, int kN>
__device__ void load_tile(Tile<kD, kN>& tile, const Task& a, const Bf16* from, std::int64_t first,
                          std::int64_t stride) {
  constexpr int kChunks = kD / 8;
  for (int i = static_cast<int>(threadIdx.x); i < kN * kChunks; i += kThreads) {
    const int row = i / kChunks, col = i % kChunks * 8;
    Chunk chunk{};
    if (first + row < a.tokens && col < a.d) {
      const Bf16* at = from + (first + row) * stride + col;
      if (a.aligned) {
        chunk = load(reinterpret_cast<const Chunk*>(at));
      } else {
#pragma unroll
        for (int k = 0; k < 8; ++k)
          if (col + k < a.d) chunk.v[k] = load(at + k);
      }
    }
    *reinterpret_cast<Chunk*>(&tile.v[row][col]) = chunk;
  }
}

// Where a thread's numbers are in a fragment C: rows g and g + 8, columns c and c + 1.
struct Lane {
  int lane = static_cast<int>(threadIdx.x) % 32, row0 = static_cast<int>(threadIdx.x) / 32 * 16;  // row0: the warp's
  int g = lane / 4, c = lane % 4 * 2;
};
// Fragments C side by side: 16 rows of 8 kTiles columns.
template <int kTiles>
struct Fragments {
  float v[kTiles][4];
};

__device__ __forceinline__ void multiply_two(float (&first)[4], float (&second)[4], const Bf16Pair (&a)[4],
                                             const Bf16Pair (&b)[4]) {
  const Bf16Pair left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
  multiply_fragments(first, a, left);
  multiply_fragments(second, a, right);
}
// c[i][j] += sum over e < kD of a[row0 + i][e] b[j][e].
template <int kD, int kTiles, int kA, int kB>
__device__ __forceinline__ void add_rows_by_rows(Fragments<kTiles>& c, const Tile<kD, kA>& a, const Tile<kD, kB>& b,
                                                 const Lane& at) {
#pragma unroll 2
  for (int k = 0; k < kD; k += 16) {
    Bf16Pair left[4], right[4];
    load_matrices(left, &a.v[at.row0 + at.lane % 16][k + at.lane / 16 * 8]);
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      load_matrices(right, &b.v[8 * n + at.lane % 8 + at.lane / 16 * 8][k + at.lane / 8 % 2 * 8]);
      multiply_two(c.v[n], c.v[n + 1], left, right);
    }
  }
}
// c[i][j] += sum over s of p[i][s] b[s][col + j], p rounded.
template <int kSteps, int kTiles, int kD, int kB>
__device__ __forceinline__ void add_scores_by_rows(Fragments<kTiles>& c, const Fragments<kSteps>& p,
                                                   const Tile<kD, kB>& b, int col, const Lane& at) {
#pragma unroll
  for (int k = 0; k < kSteps; k += 2) {
    const Bf16Pair left[4] = {rounded_pair(p.v[k][0], p.v[k][1]), rounded_pair(p.v[k][2], p.v[k][3]),
                              rounded_pair(p.v[k + 1][0], p.v[k + 1][1]), rounded_pair(p.v[k + 1][2], p.v[k + 1][3])};
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      Bf16Pair right[4];
      load_transposed(right, &b.v[8 * k + at.lane % 16][col + 8 * n + at.lane / 16 * 8]);
      multiply_two(c.v[n], c.v[n + 1], left, right);
    }
  }
}

// The warp's 16 rows, rounded, by way of a tile of which it alone reads and writes those rows: columns [col, ...).
template <int kTiles, int kD, int kN>
__device__ void store_rows(Bf16* to, const Fragments<kTiles>& c, Tile<kD, kN>& tile, const Task& a, std::int64_t first,
                           std::int64_t stride, int col, float factor, const Lane& at) {
  using Two = Pack<Bf16, 2>;
  __syncwarp();
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      *reinterpret_cast<Two*>(&tile.v[at.row0 + at.g + 8 * h][col + 8 * n + at.c]) =
          std::bit_cast<Two>(rounded_pair(c.v[n][2 * h] * factor, c.v[n][2 * h + 1] * factor));
  __syncwarp();
  for (int i = at.lane; i < 16 * kTiles; i += 32) {
    const int row = at.row0 + i / kTiles, from = col + i % kTiles * 8;
    if (first + row >= a.tokens || from >= a.d) continue;
    Bf16* target = to + (first + row) * stride + from;
    const Chunk chunk = *reinterpret_cast<const Chunk*>(&tile.v[row][from]);
    if (a.aligned) {
      store(reinterpret_cast<Chunk*>(target), chunk);
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k)
        if (from + k < a.d) store(target + k, chunk.v[k]);
    }
  }
}

// ---- forward --------------------------------------------------------------------------------------------------------

template <int kD, int kStep>
struct ForwardShared {
  Tile<kD, kRows> q;
  Tile<kD, kStep> k, v;
};

// The running softmax of a row and its part of the scores: row h of the thread's two. What older terms are scaled by.
template <int kSteps>
__device__ __forceinline__ float softmax_row(Fragments<kSteps>& p, int h, std::int64_t row, std::int64_t first_col,
                                             float scale, float& top, float& total) {
  float highest = -INFINITY, sum = 0;
#pragma unroll
  for (int n = 0; n < kSteps; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& x = p.v[n][2 * h + e];
      x = first_col + 8 * n + e <= row ? x * scale : -INFINITY;
      highest = fmaxf(highest, x);
    }
  highest = fmaxf(top, reduce_warp<kSharers>(highest, Max{}));
  const float before = exp2f(top - highest);
#pragma unroll
  for (int n = 0; n < kSteps; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& x = p.v[n][2 * h + e];
      x = exp2f(x - highest);
      sum += x;
    }
  total = total * before + reduce_warp<kSharers>(sum, Sum{});
  top = highest;
  return before;
}

template <int kD, int kStep>
__global__ void __launch_bounds__(kThreads, 2) attention_bf16_kernel(Task a) {
  auto& s = *dynamic_shared<ForwardShared<kD, kStep>>();
  const Lane at;
  const std::int64_t q0 = static_cast<std::int64_t>(gridDim.x - 1 - blockIdx.x) * kRows, head = blockIdx.y,
                     b = blockIdx.z, kv = head / (a.heads / a.kv_heads), end = min(q0 + kRows, a.tokens);
  load_tile(s.q, a, a.qkv + a.row_of(b, head), q0, a.stride);
  Fragments<kD / 8> out{};
  float top[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
  for (std::int64_t k0 = 0; k0 < end; k0 += kStep) {
    __syncthreads();
    load_tile(s.k, a, a.qkv + a.row_of(b, a.heads + kv), k0, a.stride);
    load_tile(s.v, a, a.qkv + a.row_of(b, a.heads + a.kv_heads + kv), k0, a.stride);
    __syncthreads();
    Fragments<kStep / 8> p{};
    add_rows_by_rows(p, s.q, s.k, at);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int64_t row = q0 + at.row0 + at.g + 8 * h;
      const float before = softmax_row(p, h, row, k0 + at.c, a.scale * kLog2e, top[h], total[h]);
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) out.v[n][2 * h] *= before, out.v[n][2 * h + 1] *= before;
      if (a.mask.threshold == 0) continue;
#pragma unroll
      for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) p.v[n][2 * h + e] *= a.factor(b, head, row, k0 + at.c + 8 * n + e);
    }
    add_scores_by_rows(out, p, s.v, 0, at);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const std::int64_t row = q0 + at.row0 + at.g + 8 * h;
    const float inverse = 1.0F / total[h];
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) out.v[n][2 * h] *= inverse, out.v[n][2 * h + 1] *= inverse;
    if (at.c == 0 && row < a.tokens)
      store(a.lse + (b * a.heads + head) * a.tokens + row, top[h] * kLn2 + logf(total[h]));
  }
  store_rows(a.y + b * a.tokens * a.y_stride + head * a.d, out, s.q, a, q0, a.y_stride, 0, 1.0F, at);
}

// ---- backward -------------------------------------------------------------------------------------------------------

struct RowValues {
  float lse, delta;  // lse in units of log 2
};
__device__ __forceinline__ RowValues row_values(const Task& a, std::int64_t b, std::int64_t head, std::int64_t row) {
  if (row >= a.tokens) return {INFINITY, 0.0F};  // padding: P = 0
  return {load(a.lse + (b * a.heads + head) * a.tokens + row) * kLog2e,
          load(a.delta + ((b - a.first_batch) * a.heads + head) * a.tokens + row)};
}
// Of one score: the probability with dropout, and, in place of dP, the gradient dS.
__device__ __forceinline__ void gradient_of_score(float& p, float& ds, const Task& a, std::int64_t b, std::int64_t head,
                                                  std::int64_t query, std::int64_t key, const RowValues& r) {
  const float probability = key <= query ? exp2f(p * (a.scale * kLog2e) - r.lse) : 0.0F,
              factor = a.factor(b, head, query, key);
  ds = probability * (ds * factor - r.delta);
  p = probability * factor;
}

template <int kD, int kStep>
struct QueryShared {
  Tile<kD, kRows> q, dy;
  Tile<kD, kStep> k, v;
};
template <int kD, int kStep>
__global__ void __launch_bounds__(kThreads, 2) attention_dq_bf16_kernel(Task a) {
  auto& s = *dynamic_shared<QueryShared<kD, kStep>>();
  const Lane at;
  const std::int64_t q0 = static_cast<std::int64_t>(gridDim.x - 1 - blockIdx.x) * kRows, head = blockIdx.y,
                     b = a.first_batch + blockIdx.z, kv = head / (a.heads / a.kv_heads),
                     end = min(q0 + kRows, a.tokens), row = q0 + at.row0 + at.g;
  load_tile(s.q, a, a.qkv + a.row_of(b, head), q0, a.stride);
  load_tile(s.dy, a, a.dy + b * a.tokens * a.y_stride + head * a.d, q0, a.y_stride);
  const RowValues values[2] = {row_values(a, b, head, row), row_values(a, b, head, row + 8)};
  Fragments<kD / 8> dq{};
  for (std::int64_t k0 = 0; k0 < end; k0 += kStep) {
    __syncthreads();
    load_tile(s.k, a, a.qkv + a.row_of(b, a.heads + kv), k0, a.stride);
    load_tile(s.v, a, a.qkv + a.row_of(b, a.heads + a.kv_heads + kv), k0, a.stride);
    __syncthreads();
    Fragments<kStep / 8> p{}, ds{};
    add_rows_by_rows(p, s.q, s.k, at);
    add_rows_by_rows(ds, s.dy, s.v, at);
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        gradient_of_score(p.v[n][i], ds.v[n][i], a, b, head, row + i / 2 * 8, k0 + 8 * n + at.c + i % 2, values[i / 2]);
    add_scores_by_rows(dq, ds, s.k, 0, at);
  }
  store_rows(a.dqkv + a.row_of(b, head), dq, s.q, a, q0, a.stride, 0, a.scale, at);
}

template <int kD, int kStep>
struct KeyShared {
  Tile<kD, kRows> k, v;
  Tile<kD, kStep> q, dy;
  RowValues values[kStep];
};
// Of dk and dv, kOut columns: two blocks share a head that is wider, and make its scores both.
template <int kD, int kStep, int kOut>
__global__ void __launch_bounds__(kThreads, 2) attention_dkv_bf16_kernel(Task a) {
  constexpr int kSlices = kD / kOut;
  auto& s = *dynamic_shared<KeyShared<kD, kStep>>();
  const Lane at;
  const int col = static_cast<int>(blockIdx.x) % kSlices * kOut;
  const std::int64_t k0 = static_cast<std::int64_t>(blockIdx.x / kSlices) * kRows, kv = blockIdx.y,
                     b = a.first_batch + blockIdx.z, group = a.heads / a.kv_heads, key = k0 + at.row0 + at.g;
  load_tile(s.k, a, a.qkv + a.row_of(b, a.heads + kv), k0, a.stride);
  load_tile(s.v, a, a.qkv + a.row_of(b, a.heads + a.kv_heads + kv), k0, a.stride);
  Fragments<kOut / 8> dk{}, dv{};
  for (std::int64_t head = kv * group; head < (kv + 1) * group; ++head)
    for (std::int64_t q0 = k0; q0 < a.tokens; q0 += kStep) {
      __syncthreads();
      load_tile(s.q, a, a.qkv + a.row_of(b, head), q0, a.stride);
      load_tile(s.dy, a, a.dy + b * a.tokens * a.y_stride + head * a.d, q0, a.y_stride);
      if (threadIdx.x < kStep) s.values[threadIdx.x] = row_values(a, b, head, q0 + threadIdx.x);
      __syncthreads();
      Fragments<kStep / 8> p{}, ds{};  // transposed: a row a key
      add_rows_by_rows(p, s.k, s.q, at);
      add_rows_by_rows(ds, s.v, s.dy, at);
#pragma unroll
      for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int query = 8 * n + at.c + i % 2;
          gradient_of_score(p.v[n][i], ds.v[n][i], a, b, head, q0 + query, key + i / 2 * 8, s.values[query]);
        }
      add_scores_by_rows(dv, p, s.dy, col, at);
      add_scores_by_rows(dk, ds, s.q, col, at);
    }
  store_rows(a.dqkv + a.row_of(b, a.heads + kv), dk, s.k, a, k0, a.stride, col, a.scale, at);
  store_rows(a.dqkv + a.row_of(b, a.heads + a.kv_heads + kv), dv, s.v, a, k0, a.stride, col, 1.0F, at);
}

// ---- launching ------------------------------------------------------------------------------------------------------

template <int kN>
using Constant = std::integral_constant<int, kN>;
// f(padded head size, tokens that are loaded at a time forward, for dq, and for dk and dv) as compile-time constants:
// what fits the registers and the shared memory.
template <class F>
void with_tiles(std::int64_t d, F f) {
  if (d <= 64) return f(Constant<64>{}, Constant<64>{}, Constant<32>{}, Constant<32>{});
  if (d <= 128) return f(Constant<128>{}, Constant<64>{}, Constant<32>{}, Constant<16>{});
  f(Constant<256>{}, Constant<32>{}, Constant<16>{}, Constant<16>{});
}

}  // namespace

void launch_attention(const AttentionTask<Bf16>& a, cudaStream_t stream) {
  with_tiles(a.d, [&](auto padded, auto step, auto, auto) {
    constexpr int kD = decltype(padded)::value, kStep = decltype(step)::value;
    launch_tiles<ForwardShared<kD, kStep>>("attention", attention_bf16_kernel<kD, kStep>,
                                           grid_of(a.tokens, kRows, a.heads, a.batch), kThreads, a, stream);
  });
}

void launch_attention_backward(const AttentionTask<Bf16>& a, std::int64_t batch, cudaStream_t stream) {
  with_tiles(a.d, [&](auto padded, auto, auto keys, auto queries) {
    constexpr int kD = decltype(padded)::value, kKeys = decltype(keys)::value, kQueries = decltype(queries)::value;
    constexpr int kOut = kD < 128 ? kD : 128;
    launch_tiles<QueryShared<kD, kKeys>>("attention_dq", attention_dq_bf16_kernel<kD, kKeys>,
                                         grid_of(a.tokens, kRows, a.heads, batch), kThreads, a, stream);
    dim3 grid = grid_of(a.tokens, kRows, a.kv_heads, batch);
    grid.x *= kD / kOut;
    launch_tiles<KeyShared<kD, kQueries>>("attention_dkv", attention_dkv_bf16_kernel<kD, kQueries, kOut>, grid,
                                          kThreads, a, stream);
  });
}

}  // namespace regather::cuda
