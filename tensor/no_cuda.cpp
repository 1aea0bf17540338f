// In place of tensor/cuda/ where the program is built without it.
#include "tensor/device.h"
#include "tensor/error.h"

namespace regather {

std::unique_ptr<Device> make_cuda_device(int, std::int64_t) {
  throw UsageError("device: cuda: this program was built without it; the CMake preset cuda builds one with it");
}

}  // namespace regather
