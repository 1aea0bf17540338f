#include "tensor/cuda/status.h"

#include <cuda_runtime_api.h>

#include "tensor/error.h"

namespace regather::cuda {

void check_launch(const char* kernel) {
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess)
    throw Error(fmt::format("launch of {}: {} ({})", kernel, cudaGetErrorString(status), cudaGetErrorName(status)));
}

}  // namespace regather::cuda
