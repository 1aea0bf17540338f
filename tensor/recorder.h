// When things happened on one rank: what the thread that runs the step did, as nested intervals, and which collectives
// were in flight beside it. Attached to a Device and a Communicator; costs nothing when it is not. Invariants:
// intervals close in the reverse order of their opening; the `own` times of an interval and of all inside it add up to
// its length, to the nanosecond. Only the thread that runs the step uses it. It does not sum, compare or write
// anything.
#pragma once
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "tensor/work.h"

namespace regather {

class Recorder {
 public:
  using Time = std::chrono::nanoseconds;  // of the steady clock
  // What an interval was spent on. Recompute: an operation run again. Wait: for a collective; Communicate: starting
  // collectives and moving them on between operations. Scope: whatever is inside; its own time is nothing by name.
  enum class Activity { Forward, Recompute, Backward, Update, Copy, Communicate, Wait, Rest, Scope };

  struct Interval {
    Activity activity = Activity::Rest;
    std::string name{};    // of what is counted together: "linear", "all_gather of block (forward)"
    std::string detail{};  // tells one from another, may be empty: "mlp.up", "block 3"
    Work work{};
    int parent = -1;  // the interval around it, as an index
    Time begin{}, length{}, own{};
  };
  struct Flight {  // of a collective, from its start until it was found complete
    std::string name{}, detail{};
    double bytes = 0;  // on the wire: received or sent by this rank
    Time begin{}, length{};
  };

  struct Recording {
    std::vector<Interval> intervals{};  // in the order of their beginnings; those that are open have no length yet
    std::vector<Flight> flights{};      // in the order of their ends
  };

  const Recording& recording() const { return recording_; }
  Recording take();  // and begins a new one; no interval may be open
  // Called where an interval begins and ends, when set: waits for what was enqueued, so that lengths are of the work.
  std::function<void()> settle;
  void add(Flight flight) { recording_.flights.push_back(std::move(flight)); }

  static Time now() { return std::chrono::steady_clock::now().time_since_epoch(); }

 private:
  friend class Timed;
  void begin(Interval interval);
  void end() noexcept;

  Interval& interval(int i) { return recording_.intervals[static_cast<std::size_t>(i)]; }

  Recording recording_;
  int open_ = -1;
};

class Device;
// What the device does is recorded from now on; null: no longer. On a GPU every interval waits for its own work:
// nothing overlaps while it is recorded, and a step takes longer.
void record_into(Recorder* recorder, Device& device);

// One interval, from construction to destruction. describe: gives an Interval with everything but times; called only
// when there is a recorder.
class Timed {
 public:
  template <class Describe>
  Timed(Recorder* recorder, Describe describe) : recorder_(recorder) {
    if (recorder_) recorder_->begin(describe());
  }
  ~Timed() {
    if (recorder_) recorder_->end();
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  Recorder* recorder_;
};

}  // namespace regather
