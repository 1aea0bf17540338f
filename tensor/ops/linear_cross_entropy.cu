// Losses of rows of logits (the products are cuBLAS's). Per logit: 4 bytes read from memory, about 5 flops and an
// exponential; with the gradient once more 4 bytes read (of a row that the cache may still hold) and an element
// written, another exponential. Limiter: memory bandwidth. One block a row; the order of additions follows from the
// size of the vocabulary.
#include "tensor/cuda/cuda_ops.h"
#include "tensor/cuda/quads.cuh"
#include "tensor/cuda/reduce.cuh"

namespace regather::cuda {
namespace {

constexpr int kThreads = 512;

struct LossTask {
  float *losses, *logits;
  const std::int32_t* targets;
  const float* weights;
  std::int64_t vocab;
  Fault* fault;
};
struct LossShared {
  Partials<float, 1> one;
};

template <int kStep>
__device__ __forceinline__ Pack<float, kStep> load_logits(const float* row, std::int64_t i) {
  return load(reinterpret_cast<const Pack<float, kStep>*>(row + i));
}

// f(index, logit). Four at a time if the vocabulary allows it for every row (logits are workspace, which begins at a
// whole line); one at a time otherwise: neighbouring threads then read neighbouring words.
template <int kStep, class F>
__device__ __forceinline__ void for_each_logit(const float* row, std::int64_t vocab, F f) {
  for (std::int64_t i = static_cast<std::int64_t>(threadIdx.x) * kStep; i < vocab; i += kThreads * kStep) {
    const Pack<float, kStep> piece = load_logits<kStep>(row, i);
#pragma unroll
    for (int k = 0; k < kStep; ++k) f(i + k, piece.v[k]);
  }
}
// The row becomes f(index, logit) in elements of type T, which end before the first logit that is still to be read.
template <class T, int kStep, class F>
__device__ __forceinline__ void replace_logits(float* row, std::int64_t vocab, F f) {
  for (std::int64_t first = 0; first < vocab; first += kThreads * kStep) {
    const std::int64_t i = first + static_cast<std::int64_t>(threadIdx.x) * kStep;
    Pack<T, kStep> piece{};
    if (i < vocab) {
      const Pack<float, kStep> logits = load_logits<kStep>(row, i);
#pragma unroll
      for (int k = 0; k < kStep; ++k) piece.v[k] = rounded<T>(f(i + k, logits.v[k]));
    }
    if constexpr (sizeof(T) < sizeof(float)) __syncthreads();  // other threads' logits are where this goes
    if (i < vocab) store(reinterpret_cast<Pack<T, kStep>*>(reinterpret_cast<T*>(row) + i), piece);
  }
}

template <class T, int kStep>
__global__ void __launch_bounds__(kThreads) token_losses_kernel(LossTask a) {
  auto& shared = block_shared<LossShared>();
  const std::int64_t r = blockIdx.x;
  float* row = a.logits + r * a.vocab;
  const std::int32_t target = load(a.targets + r);
  if (target < 0 || target >= a.vocab) {
    if (threadIdx.x == 0) {
      store(a.losses + r, 0.0F);
      if (target != -1 && atomicCAS(&a.fault->kind, 0, static_cast<int>(kTargetOutsideVocabulary)) == 0) {
        store(&a.fault->value, target);
        store(&a.fault->first, static_cast<std::int32_t>(r));
        store(&a.fault->limit, static_cast<std::int32_t>(a.vocab));
      }
    }
    if (a.weights) replace_logits<T, kStep>(row, a.vocab, [](std::int64_t, float) { return 0.0F; });
    return;
  }
  const float chosen = load(row + target);
  float top[1] = {-INFINITY}, total[1] = {0};
  for_each_logit<kStep>(row, a.vocab, [&](std::int64_t, float x) {
    if (x > top[0]) {  // what was added so far is of the old maximum
      total[0] *= expf(top[0] - x);
      top[0] = x;
    }
    total[0] += expf(x - top[0]);
  });
  const float mine = top[0];
  reduce_block(top, shared.one, Max{});
  total[0] *= mine == -INFINITY ? 0.0F : expf(mine - top[0]);
  reduce_block(total, shared.one, Sum{});
  if (threadIdx.x == 0) store(a.losses + r, logf(total[0]) + (top[0] - chosen));
  if (!a.weights) return;
  const float weight = load(a.weights + r), scale = weight / total[0], highest = top[0];
  replace_logits<T, kStep>(
      row, a.vocab, [=](std::int64_t i, float x) { return expf(x - highest) * scale - (i == target ? weight : 0.0F); });
}

}  // namespace

template <class T>
void CudaElementOps<T>::token_losses(float* losses, float* logits, const std::int32_t* targets, const float* weights,
                                     std::int64_t rows, std::int64_t vocab) {
  if (rows == 0) return;
  launch("token_losses", vocab % 4 == 0 ? token_losses_kernel<T, 4> : token_losses_kernel<T, 1>,
         static_cast<unsigned>(rows), kThreads, 0, context_.stream(),
         LossTask{losses, logits, targets, weights, vocab, context_.faults()});
}

template void CudaElementOps<float>::token_losses(float*, float*, const std::int32_t*, const float*, std::int64_t,
                                                  std::int64_t);
template void CudaElementOps<Bf16>::token_losses(float*, float*, const std::int32_t*, const float*, std::int64_t,
                                                 std::int64_t);

}  // namespace regather::cuda
