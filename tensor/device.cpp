#include "tensor/device.h"

#include <cstring>

namespace regather {

void CpuDevice::copy(Stream, void* to, const void* from, std::int64_t bytes) {
  if (meta() || bytes == 0) return;
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

void CpuDevice::zero(Stream, void* to, std::int64_t bytes) {
  if (meta() || bytes == 0) return;
  std::memset(to, 0, static_cast<std::size_t>(bytes));
}

}  // namespace regather
