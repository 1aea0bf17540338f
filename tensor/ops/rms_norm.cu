// Per element: forward 8 bytes moved (read x; write y), about 5 flops; backward 12 bytes (read x, dy; write dx), about
// 12 flops, and a partial sum a column for each of at most 256 chunks of rows. Limiter: memory bandwidth.
#include "tensor/cuda/norm.cuh"

namespace regather::cuda {

void CudaOps::rms_norm(float* y, const float* x, const float* gain, std::int64_t rows, std::int64_t cols, float eps) {
  norm<false>(y, x, gain, nullptr, rows, cols, eps);
}
void CudaOps::rms_norm_backward(float* dx, float* dgain, const float* x, const float* gain, const float* dy,
                                std::int64_t rows, std::int64_t cols, float eps) {
  norm_backward<false>(dx, dgain, nullptr, x, gain, dy, rows, cols, eps);
}

}  // namespace regather::cuda
