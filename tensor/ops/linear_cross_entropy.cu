// Losses of rows of logits (the products are cuBLAS's). Per logit: 4 bytes read from memory, about 5 flops and an
// exponential; with the gradient once more 4 bytes read (of a row that the cache may still hold) and 4 written, another
// exponential. Limiter: memory bandwidth. One block a row; the order of additions follows from the size of the
// vocabulary.
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

// f(index, logit) and, with kStores, its result in place of the logit. Four at a time if the vocabulary allows it for
// every row (logits are workspace, which begins at a whole line); one at a time otherwise: neighbouring threads then
// read neighbouring words.
template <bool kQuads, bool kStores, class F>
__device__ __forceinline__ void for_each_logit(float* row, std::int64_t vocab, F f) {
  constexpr int kStep = kQuads ? 4 : 1;
  using Piece = Pack<float, kStep>;
  for (std::int64_t i = static_cast<std::int64_t>(threadIdx.x) * kStep; i < vocab; i += kThreads * kStep) {
    Piece piece = load(reinterpret_cast<const Piece*>(row + i));
#pragma unroll
    for (int k = 0; k < kStep; ++k) piece.v[k] = f(i + k, piece.v[k]);
    if constexpr (kStores) store(reinterpret_cast<Piece*>(row + i), piece);
  }
}

template <bool kQuads>
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
    if (a.weights) for_each_logit<kQuads, true>(row, a.vocab, [](std::int64_t, float) { return 0.0F; });
    return;
  }
  const float chosen = load(row + target);
  float top[1] = {-INFINITY}, total[1] = {0};
  for_each_logit<kQuads, false>(row, a.vocab, [&](std::int64_t, float x) {
    if (x > top[0]) {  // what was added so far is of the old maximum
      total[0] *= expf(top[0] - x);
      top[0] = x;
    }
    total[0] += expf(x - top[0]);
    return x;
  });
  const float mine = top[0];
  reduce_block(top, shared.one, Max{});
  total[0] *= mine == -INFINITY ? 0.0F : expf(mine - top[0]);
  reduce_block(total, shared.one, Sum{});
  if (threadIdx.x == 0) store(a.losses + r, logf(total[0]) + (top[0] - chosen));
  if (!a.weights) return;
  const float weight = load(a.weights + r), scale = weight / total[0], highest = top[0];
  for_each_logit<kQuads, true>(
      row, a.vocab, [=](std::int64_t i, float x) { return expf(x - highest) * scale - (i == target ? weight : 0.0F); });
}

}  // namespace

void CudaOps::token_losses(float* losses, float* logits, const std::int32_t* targets, const float* weights,
                           std::int64_t rows, std::int64_t vocab) {
  if (rows == 0) return;
  launch("token_losses", vocab % 4 == 0 ? token_losses_kernel<true> : token_losses_kernel<false>,
         static_cast<unsigned>(rows), kThreads, 0, stream_,
         LossTask{losses, logits, targets, weights, vocab, faults_.data<Fault>()});
}

}  // namespace regather::cuda
