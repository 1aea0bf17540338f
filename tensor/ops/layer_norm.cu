// Per element: forward 8 bytes moved (read x; write y), about 8 flops; backward 12 bytes (read x, dy; write dx), about
// 16 flops, and 2 partial sums a column for each of at most 256 chunks of rows. Limiter: memory bandwidth.
#include "tensor/cuda/norm.cuh"

namespace regather::cuda {

void CudaOps::layer_norm(float* y, const float* x, const float* gain, const float* bias, std::int64_t rows,
                         std::int64_t cols, float eps) {
  norm<true>(y, x, gain, bias, rows, cols, eps);
}
void CudaOps::layer_norm_backward(float* dx, float* dgain, float* dbias, const float* x, const float* gain,
                                  const float* dy, std::int64_t rows, std::int64_t cols, float eps) {
  norm_backward<true>(dx, dgain, dbias, x, gain, dy, rows, cols, eps);
}

}  // namespace regather::cuda
