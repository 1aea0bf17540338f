// swiglu: per element 12 bytes moved (read gate, up; write y), about 10 flops. backward: 20 bytes (read gate, up, dy;
// write dgate, dup), about 15 flops. Limiter: memory bandwidth.
#include "tensor/cuda/cuda_ops.h"
#include "tensor/cuda/math.cuh"
#include "tensor/cuda/quads.cuh"

namespace regather::cuda {
namespace {

struct SwiGlu {
  float* y;
  const float *gate, *up;
  template <bool kAligned>
  __device__ void quad(std::int64_t i, std::int64_t n) const {
    Float4 g = load_quad<kAligned>(gate, i, n);
    const Float4 u = load_quad<kAligned>(up, i, n);
#pragma unroll
    for (int k = 0; k < 4; ++k) g.v[k] *= sigmoid(g.v[k]) * u.v[k];
    store_quad<kAligned>(y, i, n, g);
  }
};

struct SwiGluBackward {
  float *dgate, *dup;
  const float *gate, *up, *dy;
  template <bool kAligned>
  __device__ void quad(std::int64_t i, std::int64_t n) const {
    const Float4 g = load_quad<kAligned>(gate, i, n), d = load_quad<kAligned>(dy, i, n);
    const Float4 u = dgate ? load_quad<kAligned>(up, i, n) : Float4{};
    Float4 a, b;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float s = sigmoid(g.v[k]);
      a.v[k] = d.v[k] * u.v[k] * s * (1.0F + g.v[k] * (1.0F - s));
      b.v[k] = d.v[k] * g.v[k] * s;
    }
    if (dgate) store_quad<kAligned>(dgate, i, n, a);
    if (dup) store_quad<kAligned>(dup, i, n, b);
  }
};

}  // namespace

void CudaOps::swiglu(float* y, const float* gate, const float* up, std::int64_t n) {
  launch_quads("swiglu", all_aligned(y, gate, up), SwiGlu{y, gate, up}, n, stream_);
}
void CudaOps::swiglu_backward(float* dgate, float* dup, const float* gate, const float* up, const float* dy,
                              std::int64_t n) {
  launch_quads("swiglu_backward", all_aligned(dgate, dup, gate, up, dy), SwiGluBackward{dgate, dup, gate, up, dy}, n,
               stream_);
}

}  // namespace regather::cuda
