#include "tensor/cuda/status.h"

#include "tensor/error.h"

namespace regather::cuda {

void check_status(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  const auto text = fmt::format("{}: {} ({})", call, cudaGetErrorString(status), cudaGetErrorName(status));
  if (status == cudaErrorMemoryAllocation) throw OutOfMemory(text);
  throw Error(text);
}

void check_status(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(fmt::format("{}: {}{}", call, cublasGetStatusString(status), word_of_runtime()));
}

std::string word_of_runtime() {
  const cudaError_t status = cudaPeekAtLastError();
  if (status == cudaSuccess) return {};
  return fmt::format("; {} ({})", cudaGetErrorString(status), cudaGetErrorName(status));
}

void check_launch(const char* kernel) {
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess)
    throw Error(fmt::format("launch of {}: {} ({})", kernel, cudaGetErrorString(status), cudaGetErrorName(status)));
}

void require_at_most(const char* what, std::int64_t value, std::int64_t most) {
  check(value <= most, "{}: {}; on CUDA there are at most {}", what, value, most);
}

}  // namespace regather::cuda
