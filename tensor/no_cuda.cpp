// In place of tensor/cuda/ where the program is built without it.
#include "tensor/device.h"
#include "tensor/error.h"

namespace regather {

std::vector<GpuInfo> cuda_gpus() {
  throw UsageError(
      "device: value cuda, but this program was built without the CUDA backend; `cmake --preset cuda && cmake --build "
      "--preset cuda` builds one that has it; allowed: cpu");
}

std::unique_ptr<Device> make_cuda_device(int, std::int64_t) {
  cuda_gpus();  // says why
  return nullptr;
}

}  // namespace regather
