// Per element: forward 2 elements moved (read x; write y), about 5 flops; backward 3 (read x, dy; write dx), about
// 12 flops, and a partial sum a column for each of at most 256 chunks of rows. Limiter: memory bandwidth.
#include "tensor/cuda/norm.cuh"

namespace regather::cuda {

template <class T>
void CudaElementOps<T>::rms_norm(T* y, const T* x, const T* gain, std::int64_t rows, std::int64_t cols, float eps) {
  norm<false, T>(context_, y, x, gain, nullptr, rows, cols, eps);
}
template <class T>
void CudaElementOps<T>::rms_norm_backward(T* dx, float* dgain, const T* x, const T* gain, const T* dy,
                                          std::int64_t rows, std::int64_t cols, float eps) {
  norm_backward<false>(context_, dx, dgain, nullptr, x, gain, dy, rows, cols, eps);
}

template void CudaElementOps<float>::rms_norm(float*, const float*, const float*, std::int64_t, std::int64_t, float);
template void CudaElementOps<float>::rms_norm_backward(float*, float*, const float*, const float*, const float*,
                                                       std::int64_t, std::int64_t, float);
template void CudaElementOps<Bf16>::rms_norm(Bf16*, const Bf16*, const Bf16*, std::int64_t, std::int64_t, float);
template void CudaElementOps<Bf16>::rms_norm_backward(Bf16*, float*, const Bf16*, const Bf16*, const Bf16*,
                                                      std::int64_t, std::int64_t, float);

}  // namespace regather::cuda
