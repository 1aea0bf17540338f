// to = from, rounded to bf16. Per element: 6 bytes moved (read from; write to). Limiter: memory bandwidth.
#include "tensor/cuda/cuda_ops.h"
#include "tensor/cuda/quads.cuh"

namespace regather::cuda {
namespace {

struct Round {
  Bf16* to;
  const float* from;
  template <bool kAligned>
  __device__ void quad(std::int64_t i, std::int64_t n) const {
    store_quad<kAligned>(to, i, n, load_quad<kAligned>(from, i, n));
  }
};

}  // namespace

void round(cudaStream_t stream, Bf16* to, const float* from, std::int64_t n) {
  launch_quads("round", all_aligned(to, from), Round{to, from}, n, stream);
}

}  // namespace regather::cuda
