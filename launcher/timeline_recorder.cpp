#include "launcher/timeline_recorder.h"

#include <chrono>

#include "launcher/machine.h"
#include "launcher/run_device.h"

namespace regather {

TimelineRecorder::TimelineRecorder(Device& device)
    : device_(device), before_(device.between_ops), begin_(steady_seconds()), live_(device.memory.live_by_tag()) {
  device_.memory.log = &events_;
  record_into(&recorder_, device_);
  device_.between_ops = [this] {
    marks_.push_back({steady_seconds(), events_.size()});
    if (before_) before_();
  };
}

TimelineRecorder::~TimelineRecorder() {
  device_.memory.log = nullptr;
  device_.between_ops = before_;
  record_into(nullptr, device_);
}

MemoryTimeline TimelineRecorder::timeline(bool phases) {
  MemoryTimeline timeline;
  marks_.push_back({steady_seconds(), events_.size()});
  timeline.seconds = marks_.back().time - begin_;
  Mark last{begin_, 0};
  BytesByTag live = live_;
  timeline.points.push_back({0, live});
  for (const Mark& mark : marks_) {
    const double step = (mark.time - last.time) / static_cast<double>(mark.event - last.event + 1);
    for (std::size_t e = last.event; e < mark.event; ++e) {
      live[index(events_[e].tag)] += events_[e].bytes;
      timeline.points.push_back({last.time - begin_ + step * static_cast<double>(e - last.event + 1), live});
    }
    last = mark;
  }
  const auto since_begin = [&](Recorder::Time t) { return std::chrono::duration<double>(t).count() - begin_; };
  for (const Recorder::Interval& i : recorder_.recording().intervals) {
    if (!phases || i.activity != Recorder::Activity::Backward) continue;
    if (timeline.backward_begin == 0) timeline.backward_begin = since_begin(i.begin);
    timeline.update_begin = since_begin(i.begin + i.length);
  }
  return timeline;
}

}  // namespace regather
