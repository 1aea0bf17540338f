// What attention's kernels on fp32 and on bf16 share: the task, and how tiles are launched. A block asks for no more
// shared memory than every GPU from sm_80 on gives it.
#pragma once
#include "tensor/cuda/cuda_ops.h"
#include "tensor/cuda/math.cuh"
#include "tensor/cuda/quads.cuh"

namespace regather::cuda {

constexpr float kLog2e = 1.44269504088896341F, kLn2 = 0.69314718055994531F;
constexpr std::int64_t kMostHeadSize = 256;
constexpr std::size_t kMostSharedBytes = 99 << 10;  // of compute capability 8.6 and 8.9; others have more

template <class T>
struct AttentionTask {
  const T* qkv;
  std::int64_t batch, tokens, heads, kv_heads, d;
  std::int64_t stride, y_stride;  // of a token, in qkv and in y
  float scale;
  DeviceMask mask;
  bool aligned;       // rows of heads may be read and written 16 bytes at a time
  T* y;               // written by forward
  float* lse;         // written by forward
  T* dqkv;            // written by backward
  float* delta;       // dy . y of each row, from first_batch on
  const T *out, *dy;  // y and its gradient
  std::int64_t first_batch;

  __device__ std::int64_t row_of(std::int64_t b, std::int64_t part) const { return b * tokens * stride + part * d; }
  // What probability `col` of row `row` is multiplied by.
  __device__ float factor(std::int64_t b, std::int64_t head, std::int64_t row, std::int64_t col) const {
    return mask.threshold == 0 || col > row
               ? 1.0F
               : mask.factor(static_cast<std::uint64_t>(b),
                             static_cast<std::uint64_t>((head * tokens + row) * tokens + col));
  }
};

// Backward: `batch` sequences from first_batch on.
void launch_attention(const AttentionTask<float>& task, cudaStream_t stream);
void launch_attention(const AttentionTask<Bf16>& task, cudaStream_t stream);
void launch_attention_backward(const AttentionTask<float>& task, std::int64_t batch, cudaStream_t stream);
void launch_attention_backward(const AttentionTask<Bf16>& task, std::int64_t batch, cudaStream_t stream);

template <class Shared, class T>
void launch_tiles(const char* name, void (*kernel)(AttentionTask<T>), dim3 grid, int threads,
                  const AttentionTask<T>& task, cudaStream_t stream) {
  static_assert(sizeof(Shared) <= kMostSharedBytes);
  if (grid.x == 0 || grid.z == 0) return;
  check_status(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(sizeof(Shared))),
               "cudaFuncSetAttribute");
  launch(name, kernel, grid, static_cast<unsigned>(threads), sizeof(Shared), stream, task);
}

inline dim3 grid_of(std::int64_t tokens, int tile, std::int64_t heads, std::int64_t batch) {
  return dim3(blocks_for(tokens, tile), static_cast<unsigned>(heads), static_cast<unsigned>(batch));
}

}  // namespace regather::cuda
