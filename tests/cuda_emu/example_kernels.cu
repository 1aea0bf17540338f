#include "tests/cuda_emu/example_kernels.h"

#include "tensor/cuda/bf16.cuh"
#include "tensor/cuda/launch.cuh"

namespace cuda_emu::examples {
namespace {

using namespace regather::cuda;
using regather::Bf16;

constexpr unsigned kAll = 0xffffffffU;

dim3 for_elements(int n, int threads) { return dim3(static_cast<unsigned>((n + threads - 1) / threads)); }
__device__ int global_index() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }
__device__ int thread_index() { return static_cast<int>(threadIdx.x); }

__global__ void add_one_kernel(float* x, int n) {
  const int i = global_index();
  if (i < n) store(x + i, load(x + i) + 1.0F);
}
__global__ void copy_strided_kernel(float* to, const float* from, int n, int stride) {
  const int i = global_index();
  if (i < n) store(to + i, load(from + i * stride));
}
__global__ void copy_by_four_kernel(Float4* to, const Float4* from, int n) {
  const int i = global_index();
  if (i < n) store(to + i, load(from + i));
}

constexpr int kTile = 32, kTileRows = 8;
struct Tile {
  float v[kTile][kTile + 1];
};
__global__ void transpose_kernel(float* to, const float* from, int rows, int cols) {
  auto& tile = block_shared<Tile>().v;
  const int x = thread_index(), y = static_cast<int>(threadIdx.y);
  const int row = static_cast<int>(blockIdx.y) * kTile, col = static_cast<int>(blockIdx.x) * kTile;
  for (int k = y; k < kTile; k += kTileRows)
    if (row + k < rows && col + x < cols) tile[k][x] = load(from + (row + k) * cols + col + x);
  __syncthreads();
  for (int k = y; k < kTile; k += kTileRows)
    if (col + k < cols && row + x < rows) store(to + (col + k) * rows + row + x, tile[x][k]);
}

struct Partials {
  float v[32];
};
__global__ void block_sums_kernel(float* sums, const float* x) {
  auto& partial = block_shared<Partials>().v;
  const int lane = thread_index() % 32, warp = thread_index() / 32, warps = static_cast<int>(blockDim.x) / 32;
  float sum = load(x + global_index());
  for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(kAll, sum, bits);
  if (lane == 0) partial[warp] = sum;
  __syncthreads();
  sum = lane < warps ? partial[lane] : 0.0F;
  for (unsigned by = 16; by > 0; by /= 2) sum += __shfl_down_sync(kAll, sum, by);
  if (thread_index() == 0) store(sums + blockIdx.x, sum);
}
__global__ void rotate_in_warp_kernel(int* to, int by) {
  store(to + threadIdx.x, __shfl_sync(kAll, thread_index(), thread_index() + by));
}
__global__ void votes_kernel(int* to, const int* x, int n) {
  const bool in = thread_index() < n;
  const int mine = in ? load(x + threadIdx.x) : 0;
  const int any = __syncthreads_or(mine), all = __syncthreads_and(in ? mine : 1);
  const unsigned ballot = __ballot_sync(kAll, mine);
  if (thread_index() == 0) {
    store(to, any != 0 ? 1 : 0);
    store(to + 1, all != 0 ? 1 : 0);
    store(to + 2, static_cast<int>(ballot));
  }
}
__global__ void count_atomically_kernel(int* to) { atomicAdd(to, 1); }
struct Counter {
  int v;
};
__global__ void count_in_block_kernel(int* to) {
  int& count = block_shared<Counter>().v;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  atomicAdd(&count, 1);
  __syncthreads();
  if (threadIdx.x == 0) store(to, count);
}
__global__ void agree_kernel(int* to, int against) {
  store(to + threadIdx.x, __all_sync(kAll, thread_index() != against ? 1 : 0));
}
__global__ void dynamic_reverse_kernel(float* x) {
  float* all = dynamic_shared<float>();
  all[threadIdx.x] = load(x + threadIdx.x);
  __syncthreads();
  store(x + threadIdx.x, all[blockDim.x - 1 - threadIdx.x]);
}
__global__ void share_kernel(float* x, int n) {
  float* all = dynamic_shared<float>();
  float sum = 0;
  for (int i = 0; i < n; ++i) all[i] = 1;
  for (int i = 0; i < n; ++i) sum += all[i];
  store(x, sum);
}
struct FortyKiB {
  float v[10 << 10];
};
__global__ void share_with_static_kernel(float* x, int n) {
  block_shared<FortyKiB>().v[0] = 1;
  dynamic_shared<float>()[n - 1] = 2;
  store(x, block_shared<FortyKiB>().v[0] + dynamic_shared<float>()[n - 1]);
}
__global__ void whole_block_index_kernel(int* to) {
  const unsigned block = blockIdx.y * gridDim.x + blockIdx.x, thread = threadIdx.y * blockDim.x + threadIdx.x;
  atomicAdd(to + block * blockDim.x * blockDim.y + thread, 1);
}

// ---- faulty ---------------------------------------------------------------------------------------------------------

struct Row {
  float v[256];
};
__global__ void missing_syncthreads_kernel(float* to, const float* from, int n) {
  auto& row = block_shared<Row>().v;
  row[threadIdx.x] = load(from + threadIdx.x);
  store(to + threadIdx.x, row[(thread_index() + 33) % n]);
}
__global__ void missing_syncwarp_kernel(float* to, const float* from) {
  auto& row = block_shared<Row>().v;
  row[threadIdx.x] = load(from + threadIdx.x);
  const float other = __shfl_xor_sync(kAll, row[threadIdx.x], 1);  // a shuffle orders no memory
  store(to + threadIdx.x, row[31 - threadIdx.x] + 0.0F * other);
}
__global__ void barrier_in_branch_kernel(float* x) {
  if (threadIdx.x < 40) __syncthreads();
  store(x + threadIdx.x, 1.0F);
}
__global__ void two_barriers_kernel(float* x) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
  store(x + threadIdx.x, 1.0F);
}
__global__ void shuffle_in_branch_kernel(float* x) {
  float v = 1.0F;
  if (threadIdx.x < 20) v = __shfl_xor_sync(kAll, v, 1);
  store(x + threadIdx.x, v);
}
__global__ void shuffle_outside_mask_kernel(float* x) {
  float v = 1.0F;
  if (threadIdx.x < 16) v = __shfl_sync(0xffffU, v, 20);
  store(x + threadIdx.x, v);
}
__global__ void reads_uninitialised_shared_kernel(float* to) { store(to, block_shared<Row>().v[0]); }
__global__ void store_past_end_kernel(float* x, int n) {
  if (global_index() <= n) store(x + global_index(), 1.0F);
}
__global__ void plain_store_past_end_kernel(float* x, int n) { x[n] = 1.0F; }
__global__ void load_misaligned_kernel(float* to, const float* from) {
  store(to, load(reinterpret_cast<const Float4*>(from + 1)).v[0]);
}
__global__ void fault_before_barrier_kernel(float* x, int n) {
  if (threadIdx.x == blockDim.x - 1) store(x + n, 1.0F);
  __syncthreads();
}
__global__ void atomic_past_end_kernel(float* x, int n) { atomicAdd(x + n, 1.0F); }
__global__ void shuffle_from_missing_lane_kernel(int* to) {
  store(to + threadIdx.x, __shfl_sync(kAll, thread_index(), 25));
}
__global__ void race_between_blocks_kernel(float* x) {
  if (threadIdx.x == 0) *x += 1.0F;  // without an atomic, and without the helpers
}

struct Matrices {
  alignas(16) Bf16 a[16][16], b[16][16];
};
__global__ void tensor_cores_kernel(float* c, const float* a, const float* b, Right right) {
  auto& s = block_shared<Matrices>();
  const int lane = thread_index();
  for (int i = lane; i < 256; i += 32) {
    s.a[i / 16][i % 16] = rounded<Bf16>(load(a + i));
    s.b[i / 16][i % 16] = rounded<Bf16>(load(b + i));
  }
  __syncwarp();
  Bf16Pair left[4], both[4];
  load_matrices(left, &s.a[lane % 16][lane / 16 * 8]);
  if (right == Right::Transposed)
    load_matrices(both, &s.b[lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8]);
  else
    load_transposed(both, &s.b[lane % 16][lane / 16 * 8]);
  for (int half = 0; half < 2; ++half) {
    float sums[4] = {};
    multiply_fragments(sums, left, {both[2 * half], both[2 * half + 1]});
    for (int i = 0; i < 4; ++i) store(c + (lane / 4 + i / 2 * 8) * 16 + 8 * half + lane % 4 * 2 + i % 2, sums[i]);
  }
}
__global__ void one_product_kernel(float* c) {
  float sums[4] = {};
  multiply_fragments(sums, {0, 0, 0, 0}, {0, 0});
  store(c + threadIdx.x, sums[0]);
}
__global__ void matrix_outside_shared_memory_kernel(float* to) {
  Bf16Pair r[4];
  load_matrices(r, reinterpret_cast<const Bf16*>(to));
  store(to + threadIdx.x, static_cast<float>(r[0]));
}
__global__ void misaligned_matrix_kernel(float* to) {
  Bf16Pair r[4];
  load_matrices(r, &block_shared<Matrices>().a[0][4]);
  store(to + threadIdx.x, static_cast<float>(r[0]));
}

}  // namespace

void add_one(float* x, int n, Stream s) { launch("add_one", add_one_kernel, for_elements(n, 64), 64, 0, s, x, n); }
void copy_strided(float* to, const float* from, int n, int stride, Stream s) {
  launch("copy_strided", copy_strided_kernel, for_elements(n, 64), 64, 0, s, to, from, n, stride);
}
void copy_by_four(float* to, const float* from, int n, Stream s) {
  launch("copy_by_four", copy_by_four_kernel, for_elements(n / 4, 64), 64, 0, s, reinterpret_cast<Float4*>(to),
         reinterpret_cast<const Float4*>(from), n / 4);
}
void transpose(float* to, const float* from, int rows, int cols, Stream s) {
  const dim3 grid(for_elements(cols, kTile).x, for_elements(rows, kTile).x);
  launch("transpose", transpose_kernel, grid, dim3(kTile, kTileRows), 0, s, to, from, rows, cols);
}
void block_sums(float* sums, const float* x, int blocks, int threads, Stream s) {
  launch("block_sums", block_sums_kernel, static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, s, sums, x);
}
void rotate_in_warp(int* to, int by, Stream s) { launch("rotate_in_warp", rotate_in_warp_kernel, 1, 32, 0, s, to, by); }
void votes(int* to, const int* x, int n, Stream s) { launch("votes", votes_kernel, 1, 64, 0, s, to, x, n); }
void count_atomically(int* to, int blocks, int threads, Stream s) {
  launch("count_atomically", count_atomically_kernel, static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0,
         s, to);
}
void count_in_block(int* to, int threads, Stream s) {
  launch("count_in_block", count_in_block_kernel, 1, static_cast<unsigned>(threads), 0, s, to);
}
void agree(int* to, int threads, int against, Stream s) {
  launch("agree", agree_kernel, 1, static_cast<unsigned>(threads), 0, s, to, against);
}
void dynamic_reverse(float* x, int n, Stream s) {
  launch("dynamic_reverse", dynamic_reverse_kernel, 1, static_cast<unsigned>(n),
         static_cast<std::size_t>(n) * sizeof(float), s, x);
}
bool let_share(int bytes) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(share_kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              bytes) == cudaSuccess;
}
void share(float* x, int bytes, Stream s) {
  launch("share", share_kernel, 1, 1, static_cast<std::size_t>(bytes), s, x, bytes / 4);
}
void share_with_static(float* x, int bytes, Stream s) {
  launch("share_with_static", share_with_static_kernel, 1, 1, static_cast<std::size_t>(bytes), s, x, bytes / 4);
}
void too_many_threads(float* x, Stream s) { launch("too_many_threads", add_one_kernel, 1, 1025, 0, s, x, 1); }
void whole_block_index(int* to, Stream s) {
  launch("whole_block_index", whole_block_index_kernel, dim3(2, 3), dim3(4, 2), 0, s, to);
}

void missing_syncthreads(float* to, const float* from, int n, Stream s) {
  launch("missing_syncthreads", missing_syncthreads_kernel, 1, static_cast<unsigned>(n), 0, s, to, from, n);
}
void missing_syncwarp(float* to, const float* from, Stream s) {
  launch("missing_syncwarp", missing_syncwarp_kernel, 1, 32, 0, s, to, from);
}
void barrier_in_branch(float* x, Stream s) { launch("barrier_in_branch", barrier_in_branch_kernel, 1, 64, 0, s, x); }
void two_barriers(float* x, Stream s) { launch("two_barriers", two_barriers_kernel, 1, 64, 0, s, x); }
void shuffle_in_branch(float* x, Stream s) { launch("shuffle_in_branch", shuffle_in_branch_kernel, 1, 32, 0, s, x); }
void shuffle_outside_mask(float* x, Stream s) {
  launch("shuffle_outside_mask", shuffle_outside_mask_kernel, 1, 32, 0, s, x);
}
void reads_uninitialised_shared(float* to, Stream s) {
  launch("reads_uninitialised_shared", reads_uninitialised_shared_kernel, 1, 1, 0, s, to);
}
void store_past_end(float* x, int n, Stream s) {
  launch("store_past_end", store_past_end_kernel, for_elements(n + 1, 64), 64, 0, s, x, n);
}
void plain_store_past_end(float* x, int n, Stream s) {
  launch("plain_store_past_end", plain_store_past_end_kernel, 1, 1, 0, s, x, n);
}
void load_misaligned(float* to, const float* from, Stream s) {
  launch("load_misaligned", load_misaligned_kernel, 1, 1, 0, s, to, from);
}
void fault_before_barrier(float* x, int n, Stream s) {
  launch("fault_before_barrier", fault_before_barrier_kernel, 1, 64, 0, s, x, n);
}
void atomic_past_end(float* x, int n, Stream s) { launch("atomic_past_end", atomic_past_end_kernel, 1, 1, 0, s, x, n); }
void shuffle_from_missing_lane(int* to, Stream s) {
  launch("shuffle_from_missing_lane", shuffle_from_missing_lane_kernel, 1, 20, 0, s, to);
}
void race_between_blocks(float* x, int blocks, Stream s) {
  launch("race_between_blocks", race_between_blocks_kernel, static_cast<unsigned>(blocks), 32, 0, s, x);
}
void tensor_cores(float* c, const float* a, const float* b, Right right, Stream stream) {
  launch("tensor_cores", tensor_cores_kernel, 1, 32, 0, stream, c, a, b, right);
}
void tensor_cores_of_half_a_warp(float* c, Stream stream) {
  launch("tensor_cores_of_half_a_warp", one_product_kernel, 1, 16, 0, stream, c);
}
void matrix_outside_shared_memory(float* to, Stream stream) {
  launch("matrix_outside_shared_memory", matrix_outside_shared_memory_kernel, 1, 32, 0, stream, to);
}
void misaligned_matrix(float* to, Stream stream) {
  launch("misaligned_matrix", misaligned_matrix_kernel, 1, 32, 0, stream, to);
}

}  // namespace cuda_emu::examples
