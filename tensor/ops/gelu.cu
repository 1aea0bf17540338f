// gelu: per element 2 elements moved (read x; write y), about 20 flops. backward: 3 (read x, dy; write dx), about 30
// flops. Limiter: memory bandwidth.
#include "tensor/cuda/cuda_ops.h"
#include "tensor/cuda/math.cuh"
#include "tensor/cuda/quads.cuh"

namespace regather::cuda {
namespace {

constexpr float kTwoRootTwoOverPi = 2 * 0.79788456080286536F, kCubic = 0.044715F;

__device__ __forceinline__ float gate_of(float x) { return sigmoid(kTwoRootTwoOverPi * x * (1.0F + kCubic * x * x)); }

template <class T>
struct Gelu {
  T* y;
  const T* x;
  template <bool kAligned>
  __device__ void quad(std::int64_t i, std::int64_t n) const {
    Float4 q = load_quad<kAligned>(x, i, n);
#pragma unroll
    for (float& v : q.v) v *= gate_of(v);
    store_quad<kAligned>(y, i, n, q);
  }
};

template <class T>
struct GeluBackward {
  T* dx;
  const T *x, *dy;
  template <bool kAligned>
  __device__ void quad(std::int64_t i, std::int64_t n) const {
    const Float4 q = load_quad<kAligned>(x, i, n);
    Float4 d = load_quad<kAligned>(dy, i, n);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float a = q.v[k], s = gate_of(a), slope = kTwoRootTwoOverPi * (1.0F + 3 * kCubic * a * a);
      d.v[k] *= s + a * s * (1.0F - s) * slope;
    }
    store_quad<kAligned>(dx, i, n, d);
  }
};

}  // namespace

template <class T>
void CudaElementOps<T>::gelu(T* y, const T* x, std::int64_t n) {
  launch_quads("gelu", all_aligned(y, x), Gelu<T>{y, x}, n, context_.stream());
}
template <class T>
void CudaElementOps<T>::gelu_backward(T* dx, const T* x, const T* dy, std::int64_t n) {
  launch_quads("gelu_backward", all_aligned(dx, x, dy), GeluBackward<T>{dx, x, dy}, n, context_.stream());
}

template void CudaElementOps<float>::gelu(float*, const float*, std::int64_t);
template void CudaElementOps<float>::gelu_backward(float*, const float*, const float*, std::int64_t);
template void CudaElementOps<Bf16>::gelu(Bf16*, const Bf16*, std::int64_t);
template void CudaElementOps<Bf16>::gelu_backward(Bf16*, const Bf16*, const Bf16*, std::int64_t);

}  // namespace regather::cuda
