// swiglu: per element 3 elements moved (read gate, up; write y), about 10 flops. backward: 5 (read gate, up, dy; write
// dgate, dup), about 15 flops. Limiter: memory bandwidth.
#include "tensor/cuda/cuda_ops.h"
#include "tensor/cuda/math.cuh"
#include "tensor/cuda/quads.cuh"

namespace regather::cuda {
namespace {

template <class T>
struct SwiGlu {
  T* y;
  const T *gate, *up;
  template <bool kAligned>
  __device__ void quad(std::int64_t i, std::int64_t n) const {
    Float4 g = load_quad<kAligned>(gate, i, n);
    const Float4 u = load_quad<kAligned>(up, i, n);
#pragma unroll
    for (int k = 0; k < 4; ++k) g.v[k] *= sigmoid(g.v[k]) * u.v[k];
    store_quad<kAligned>(y, i, n, g);
  }
};

template <class T>
struct SwiGluBackward {
  T *dgate, *dup;
  const T *gate, *up, *dy;
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

template <class T>
void CudaElementOps<T>::swiglu(T* y, const T* gate, const T* up, std::int64_t n) {
  launch_quads("swiglu", all_aligned(y, gate, up), SwiGlu<T>{y, gate, up}, n, context_.stream());
}
template <class T>
void CudaElementOps<T>::swiglu_backward(T* dgate, T* dup, const T* gate, const T* up, const T* dy, std::int64_t n) {
  launch_quads("swiglu_backward", all_aligned(dgate, dup, gate, up, dy), SwiGluBackward<T>{dgate, dup, gate, up, dy}, n,
               context_.stream());
}

template void CudaElementOps<float>::swiglu(float*, const float*, const float*, std::int64_t);
template void CudaElementOps<float>::swiglu_backward(float*, float*, const float*, const float*, const float*,
                                                     std::int64_t);
template void CudaElementOps<Bf16>::swiglu(Bf16*, const Bf16*, const Bf16*, std::int64_t);
template void CudaElementOps<Bf16>::swiglu_backward(Bf16*, Bf16*, const Bf16*, const Bf16*, const Bf16*, std::int64_t);

}  // namespace regather::cuda
