// The memory of a step of one rank over time, as it runs: what its device allocates and gives back, with the time.
// Invariant: the device is as it was before, once the recorder is gone. It draws and thins nothing.
#pragma once
#include <functional>
#include <vector>

#include "launcher/comparison.h"
#include "tensor/device.h"
#include "tensor/recorder.h"

namespace regather {

class TimelineRecorder {
 public:
  explicit TimelineRecorder(Device& device);
  ~TimelineRecorder();
  TimelineRecorder(const TimelineRecorder&) = delete;
  TimelineRecorder& operator=(const TimelineRecorder&) = delete;

  // So far. phases: with the times at which backward and update begin. The time of an allocation between two operations
  // is its place among those between them.
  MemoryTimeline timeline(bool phases);

 private:
  struct Mark {
    double time;
    std::size_t event;
  };
  Device& device_;
  Recorder recorder_;
  std::function<void()> before_;
  double begin_;
  BytesByTag live_;
  std::vector<Allocator::Event> events_;
  std::vector<Mark> marks_;
};

}  // namespace regather
