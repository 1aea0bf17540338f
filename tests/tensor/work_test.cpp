// What operations declare of their work, by hand, and the limits that it is compared with.
#include "tensor/work.h"

#include <gtest/gtest.h>

#include "tests/tensor/one_tape.h"

// After the toy operations, whose blocks would otherwise find these, too.
#include "tensor/ops/embedding.h"
#include "tensor/ops/linear.h"

namespace regather::toy {
namespace {

// The work that an operation of the product declares, by the tape: forward and backward of one application.
std::pair<Work, Work> work_of(std::vector<ParamInfo> params, const Shape& x, DType dtype, auto apply) {
  OneTape t(std::move(params), Allocator::Mode::Meta);
  Recorder recorder;
  t.device.recorder = &recorder;
  Tape tape(t.device, keep_all());
  regather::Run run = t.recording(tape);
  const Tensor y = apply(run, tape.input(Tensor(t.device.memory, x, Tag::Activations, dtype), dtype == DType::F32));
  tape.outputs({y});
  tape.backward(t.params, {Tensor(t.device.memory, y.shape(), Tag::Workspace)}, t.grads);
  const auto& intervals = recorder.recording().intervals;
  EXPECT_EQ(intervals.size(), 2U);
  return {intervals.at(0).work, intervals.at(1).work};
}

TEST(Work, OfALinearLayerIsAProductForwardAndOneForEachGradientThatIsWanted) {
  const auto apply = [](regather::Run& run, Tensor x) { return regather::linear(run, std::move(x), 0, 1); };
  const double x = 6 * 8, y = 6 * 5, w = 5 * 8, b = 5, product = 2.0 * 6 * 8 * 5;
  const auto [forward, backward] =
      work_of({{.name = "w", .shape = {5, 8}}, {.name = "b", .shape = {5}}}, {6, 8}, DType::F32, apply);
  EXPECT_EQ(forward.flops, product);
  EXPECT_EQ(forward.bytes, 4 * (x + w + b + y));
  EXPECT_EQ(backward.flops, 2 * product);
  EXPECT_EQ(backward.bytes, 4 * (x + x + y + 3 * (w + b)));  // x, dx, dy; w, and dw read and written
  const auto frozen =
      work_of({{.name = "w", .shape = {5, 8}, .trainable = false}, {.name = "b", .shape = {5}, .trainable = false}},
              {6, 8}, DType::F32, apply);
  EXPECT_EQ(frozen.second.flops, product);
  EXPECT_EQ(frozen.second.bytes, 4 * (x + y + w + b));
}

TEST(Work, OfALookupIsTheRowsThatItTouches) {
  const auto [forward, backward] =
      work_of({{.name = "table", .shape = {1000, 8}}, {.name = "positions", .shape = {3, 8}}}, {2, 3}, DType::I32,
              [](regather::Run& run, Tensor x) { return regather::embedding(run, std::move(x), 0, 1); });
  const double rows = 6 * 8, positions = 3 * 8;
  EXPECT_EQ(forward.bytes, 4 * (2 * rows + positions));
  EXPECT_EQ(backward.bytes, 4 * (3 * rows + 2 * positions));
}

TEST(Work, TakesAtLeastWhatTheSlowerOfArithmeticAndMemoryTakes) {
  const MachineLimits limits{.flops = 100, .bytes = 10};
  EXPECT_EQ(least_seconds({.flops = 200, .bytes = 10}, limits), 2);
  EXPECT_EQ(least_seconds({.flops = 200, .bytes = 30}, limits), 3);
  EXPECT_EQ(limited_by({.flops = 200, .bytes = 10}, limits), LimitedBy::Flops);
  EXPECT_EQ(limited_by({.flops = 200, .bytes = 30}, limits), LimitedBy::Bytes);
}

TEST(Work, LimitsAreMeasured) {
  const MachineLimits limits = measure_limits(std::chrono::milliseconds(1), steady_seconds);
  EXPECT_GT(limits.flops, 1e7);
  EXPECT_GT(limits.bytes, 1e7);
}

}  // namespace
}  // namespace regather::toy
