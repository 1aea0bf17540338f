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

void CpuDevice::add(Stream, float* sum, const float* a, const float* b, std::int64_t n) {
  if (meta()) return;
#pragma GCC ivdep  // sum may be a or b, whole: no element reads what another writes
  for (std::int64_t i = 0; i < n; ++i) sum[i] = a[i] + b[i];
}

}  // namespace regather
