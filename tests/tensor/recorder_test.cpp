// Intervals of one thread: they nest, add up, and are those of the operations that ran.
#include "tensor/recorder.h"

#include <gtest/gtest.h>

#include <thread>

#include "tests/tensor/one_tape.h"

namespace regather::toy {
namespace {

using Activity = Recorder::Activity;
using Interval = Recorder::Interval;

Interval named(const char* name, Activity activity = Activity::Rest) { return {.activity = activity, .name = name}; }

TEST(Recorder, OwnTimesOfAnIntervalAndOfAllInsideItAddUpToItsLength) {
  Recorder recorder;
  {
    const Timed outer(&recorder, [] { return named("outer"); });
    for (int i = 0; i < 3; ++i) {
      const Timed inner(&recorder, [] { return named("inner"); });
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      const Timed innermost(&recorder, [] { return named("innermost"); });
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  const auto recording = recorder.take();
  ASSERT_EQ(recording.intervals.size(), 7U);
  Recorder::Time own{};
  for (const Interval& i : recording.intervals) own += i.own;
  EXPECT_EQ(own, recording.intervals[0].length);
  EXPECT_EQ(recording.intervals[0].parent, -1);
  EXPECT_EQ(recording.intervals[3].parent, 0);
  EXPECT_EQ(recording.intervals[4].parent, 3);
  EXPECT_GE(recording.intervals[1].own, std::chrono::milliseconds(2));
  EXPECT_GE(recording.intervals[2].length, std::chrono::milliseconds(1));
  EXPECT_EQ(recording.intervals[1].own, recording.intervals[1].length - recording.intervals[2].length);
  EXPECT_TRUE(recorder.recording().intervals.empty());
}

TEST(Recorder, AnExceptionClosesWhatIsOpen) {
  Recorder recorder;
  try {
    const Timed outer(&recorder, [] { return named("outer"); });
    const Timed inner(&recorder, [] { return named("inner"); });
    throw Error("in the middle");
  } catch (const Error&) {
  }
  EXPECT_EQ(recorder.take().intervals.size(), 2U);
}

TEST(Recorder, AnOpenRecordingCannotBeTaken) {
  Recorder recorder;
  const Timed open(&recorder, [] { return named("open"); });
  EXPECT_THROW(recorder.take(), LogicError);
}

TEST(Recorder, WithoutOneNothingIsDescribed) {
  const Timed timed(nullptr, []() -> Interval { throw LogicError("described"); });
}

TEST(Recorder, ATapeRecordsWhatItRunsRerunsAndRunsBackward) {
  OneTape t(toy_block_params("", 8, 16, false));
  Recorder recorder;
  t.device.recorder = &recorder;
  Tape tape(t.device, drop_all());
  {
    regather::Run run = t.recording(tape);
    Activations in{tape.input(t.activation({6, 8}, 10), true), tape.input(t.activation({6, 1}, 11), false)};
    tape.outputs(ToyBlock().forward(run, in));
  }
  tape.backward(t.params, {t.gradient({6, 8}, 5), Tensor()}, t.grads);
  Counts runs, reruns, backward;
  Recorder::Time own{}, top{};
  bool marked = false;
  for (const Interval& i : recorder.recording().intervals) {
    if (i.activity == Activity::Forward) ++runs[i.name];
    if (i.activity == Activity::Recompute) ++reruns[i.name];
    if (i.activity == Activity::Backward) ++backward[i.name];
    marked = marked || (i.activity == Activity::Recompute && i.detail == "mlp.up");
    own += i.own;
    if (i.parent < 0) top += i.length;
  }
  EXPECT_EQ(runs, t.trace.runs);
  EXPECT_EQ(reruns, t.trace.reruns);
  EXPECT_EQ(backward, runs);
  EXPECT_TRUE(marked);
  EXPECT_EQ(own, top);
}

}  // namespace
}  // namespace regather::toy
