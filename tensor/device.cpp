#include "tensor/device.h"

#include <cstring>

#include "tensor/recorder.h"

namespace regather {
namespace {

Recorder::Interval memory_work(const char* name, std::int64_t bytes) {
  return {.activity = Recorder::Activity::Copy, .name = name, .work = {.bytes = static_cast<double>(bytes)}};
}

}  // namespace

void CpuDevice::copy(Stream, void* to, const void* from, std::int64_t bytes) {
  if (meta() || bytes == 0) return;
  const Timed timed(recorder, [&] { return memory_work("copy", 2 * bytes); });
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

void CpuDevice::zero(Stream, void* to, std::int64_t bytes) {
  if (meta() || bytes == 0) return;
  const Timed timed(recorder, [&] { return memory_work("zero", bytes); });
  std::memset(to, 0, static_cast<std::size_t>(bytes));
}

void CpuDevice::add(Stream, float* sum, const float* a, const float* b, std::int64_t n) {
  if (meta()) return;
  const Timed timed(recorder, [&] { return memory_work("add", 3 * n * 4); });
#pragma GCC ivdep  // sum may be a or b, whole: no element reads what another writes
  for (std::int64_t i = 0; i < n; ++i) sum[i] = a[i] + b[i];
}

}  // namespace regather
