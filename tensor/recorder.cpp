#include "tensor/recorder.h"

#include <utility>

#include "tensor/device.h"
#include "tensor/error.h"

namespace regather {

void record_into(Recorder* recorder, Device& device) {
  device.recorder = recorder;
  if (recorder && device.kind() == DeviceKind::Cuda)
    recorder->settle = [&device] { device.record(Stream::Compute).wait(); };
}

void Recorder::begin(Interval interval) {
  if (settle) settle();
  interval.parent = open_;
  recording_.intervals.push_back(std::move(interval));
  open_ = static_cast<int>(recording_.intervals.size()) - 1;
  recording_.intervals.back().begin = now();
}

void Recorder::end() noexcept {
  try {
    if (settle) settle();
  } catch (...) {  // a device that failed: what waits for it next says so
  }
  const Time end = now();
  Interval& closed = interval(open_);
  closed.length = end - closed.begin;
  closed.own += closed.length;  // until here: less what was inside
  open_ = closed.parent;
  if (open_ >= 0) interval(open_).own -= closed.length;
}

Recorder::Recording Recorder::take() {
  check(open_ < 0, "a recording is taken while an interval is open");
  Recording taken = std::exchange(recording_, {});
  recording_.intervals.reserve(taken.intervals.size());  // the next one is alike: it need not grow while time runs
  recording_.flights.reserve(taken.flights.size());
  return taken;
}

}  // namespace regather
