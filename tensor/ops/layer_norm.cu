// Per element: forward 2 elements moved (read x; write y), about 8 flops; backward 3 (read x, dy; write dx), about
// 16 flops, and 2 partial sums a column for each of at most 256 chunks of rows. Limiter: memory bandwidth.
#include "tensor/cuda/norm.cuh"

namespace regather::cuda {

template <class T>
void CudaElementOps<T>::layer_norm(T* y, const T* x, const T* gain, const T* bias, std::int64_t rows, std::int64_t cols,
                                   float eps) {
  norm<true>(context_, y, x, gain, bias, rows, cols, eps);
}
template <class T>
void CudaElementOps<T>::layer_norm_backward(T* dx, float* dgain, float* dbias, const T* x, const T* gain, const T* dy,
                                            std::int64_t rows, std::int64_t cols, float eps) {
  norm_backward<true>(context_, dx, dgain, dbias, x, gain, dy, rows, cols, eps);
}

template void CudaElementOps<float>::layer_norm(float*, const float*, const float*, const float*, std::int64_t,
                                                std::int64_t, float);
template void CudaElementOps<float>::layer_norm_backward(float*, float*, float*, const float*, const float*,
                                                         const float*, std::int64_t, std::int64_t, float);
template void CudaElementOps<Bf16>::layer_norm(Bf16*, const Bf16*, const Bf16*, const Bf16*, std::int64_t, std::int64_t,
                                               float);
template void CudaElementOps<Bf16>::layer_norm_backward(Bf16*, float*, float*, const Bf16*, const Bf16*, const Bf16*,
                                                        std::int64_t, std::int64_t, float);

}  // namespace regather::cuda
