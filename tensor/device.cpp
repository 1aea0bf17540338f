#include "tensor/device.h"

#include <cstring>

#include "tensor/copy_thread.h"
#include "tensor/error.h"
#include "tensor/gpu_room.h"
#include "tensor/ops/kernels.h"
#include "tensor/recorder.h"

namespace regather {
namespace {

Recorder::Interval memory_work(const char* name, std::int64_t bytes) {
  return {.activity = Recorder::Activity::Copy, .name = name, .work = {.bytes = static_cast<double>(bytes)}};
}

bool copies_by_itself(Stream stream) { return stream == Stream::ToHost || stream == Stream::ToDevice; }

}  // namespace

CpuDevice::CpuDevice(Allocator::Mode mode, std::int64_t limit, DeviceKind stands_for)
    : Device(mode, limit), kind_(stands_for) {
  check(stands_for == DeviceKind::Cpu || meta(), "a CPU with memory stands for no other device");
  if (stands_for == DeviceKind::Cuda) room_ = take_gpu_room(memory);
}

CpuDevice::~CpuDevice() = default;

CopyThread& CpuDevice::start(Stream stream) {
  auto& thread = stream == Stream::ToHost ? to_host_ : to_device_;
  if (!thread)
    thread = std::make_unique<CopyThread>([this, stream](std::int64_t bytes) {
      if (before_copy) before_copy(stream, bytes);
    });
  return *thread;
}

Event CpuDevice::record(Stream stream) {
  return copies_by_itself(stream) && !meta() ? start(stream).record() : Event();
}

void CpuDevice::wait(Stream stream, const Event& event) {
  if (!copies_by_itself(stream)) return event.wait();
  if (event.state() != nullptr) start(stream).wait(event);
}

void CpuDevice::copy(Stream stream, void* to, const void* from, std::int64_t bytes) {
  if (bytes == 0 || (meta() && copies_by_itself(stream))) return;
  if (copies_by_itself(stream)) return start(stream).copy(to, from, bytes);
  const Timed timed(recorder, [&] { return memory_work("copy", 2 * bytes); });
  if (meta()) return;
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

CopyCounts CpuDevice::copies(Stream stream) const {
  const auto& thread = stream == Stream::ToHost ? to_host_ : to_device_;
  return thread ? thread->counts() : CopyCounts();
}

void CpuDevice::zero(Stream, void* to, std::int64_t bytes) {
  if (bytes == 0) return;
  const Timed timed(recorder, [&] { return memory_work("zero", bytes); });
  if (meta()) return;
  std::memset(to, 0, static_cast<std::size_t>(bytes));
}

void CpuDevice::add(Stream, float* sum, const float* a, const float* b, std::int64_t n) {
  const Timed timed(recorder, [&] { return memory_work("add", 3 * n * 4); });
  if (meta()) return;
#pragma GCC ivdep  // sum may be a or b, whole: no element reads what another writes
  for (std::int64_t i = 0; i < n; ++i) sum[i] = a[i] + b[i];
}

void CpuDevice::add(Stream, Bf16* sum, const Bf16* a, const Bf16* b, std::int64_t n) {
  const Timed timed(recorder, [&] { return memory_work("add", 3 * n * 2); });
  if (!meta()) kernels_on<Bf16>().add(sum, a, b, n);
}

void CpuDevice::round(Stream, Bf16* to, const float* from, std::int64_t n) {
  if (n == 0) return;
  const Timed timed(recorder, [&] { return memory_work("round", n * (4 + 2)); });
  if (!meta()) kernels().round(to, from, n);
}

}  // namespace regather
