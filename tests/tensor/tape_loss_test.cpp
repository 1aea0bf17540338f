// Losses: recorded, and computed together with their gradient.
#include "tensor/tape.h"
#include "tests/tensor/split.h"

namespace regather {
namespace {

using namespace toy;

using Recorder = regather::Run;  // inside a TEST, Run is gtest's

// loss = x^2 / 2 of each element, computed with its gradient. Saves x and the loss, which backward fills.
struct Loss final : Op {
  explicit Loss(int* forwards, int* backwards) : forwards_(forwards), backwards_(backwards) {}
  std::string_view name() const override { return "loss"; }
  Types outputs(In in, Params) const override { return {in[0]}; }
  Saved saved(const Needs&) const override { return {.inputs = 1, .outputs = 1}; }
  bool fused_with_backward() const override { return true; }
  static float of(float x) { return x * x / 2; }
  void forward(const Call& k) const override {
    ++*forwards_;
    for (std::int64_t i = 0; i < k.in[0].numel(); ++i) k.out[0].fresh()[i] = of(k.in[0].data()[i]);
  }
  void backward(const BackwardCall& k) const override {
    ++*backwards_;
    for (std::int64_t i = 0; i < k.in[0].numel(); ++i) {
      k.out[0].fresh()[i] = of(k.in[0].data()[i]);
      k.din[0].fresh()[i] = k.dout[0].data()[i] * k.in[0].data()[i];
    }
  }

 private:
  int *forwards_, *backwards_;
};

TEST(TapeLoss, IsComputedOnceTogetherWithItsGradient) {
  for (const SavePlan& plan : {keep_all(), drop_all(), verified(drop_all()), with(drop_all(), Order::Eager)}) {
    OneTape t;
    int forwards = 0, backwards = 0;
    Tape tape(t.device, plan);
    Tensor losses;
    const Tensor x = t.activation(row(), 3), dy = t.gradient(row(), 4);
    {
      auto r = t.recording(tape);
      Tensor h = split(r, tape.input(x, true))[1];
      losses = r.apply(std::make_unique<Loss>(&forwards, &backwards), {h})[0];
      tape.outputs({losses});
    }
    EXPECT_EQ(forwards + backwards, 0);
    const Tensor dx = tape.backward(t.params, {dy}, t.grads)[0];
    EXPECT_EQ(forwards, 0);
    EXPECT_EQ(backwards, 1);
    for (int i = 0; i < 3; ++i) {  // (2 x)^2 / 2
      EXPECT_FLOAT_EQ(losses.data()[i], 2 * x.data()[i] * x.data()[i]);
      EXPECT_FLOAT_EQ(dx.data()[i], dy.data()[i] * 4 * x.data()[i]);
    }
    EXPECT_EQ(t.trace.reruns["loss"], 0);
  }
}

TEST(TapeLoss, HasAForwardOfItsOwnInEvaluation) {
  OneTape t;
  int forwards = 0, backwards = 0;
  auto r = t.evaluating();
  const Tensor x = t.activation(row(), 3);
  const Tensor y = r.apply(std::make_unique<Loss>(&forwards, &backwards), {x})[0];
  EXPECT_EQ(forwards, 1);
  EXPECT_EQ(backwards, 0);
  EXPECT_EQ(y.data()[2], Loss::of(x.data()[2]));
}

TEST(TapeLoss, CannotBeReadBeforeItIsThere) {
  OneTape t;
  int forwards = 0, backwards = 0;
  Tape tape(t.device, keep_all());
  auto r = t.recording(tape);
  Tensor y = r.apply(std::make_unique<Loss>(&forwards, &backwards), {tape.input(t.activation(row(), 3), true)})[0];
  EXPECT_EQ(message_of([&] { split(r, y); }), "split: 'loss.0' is computed in backward and cannot be read in forward");
}

}  // namespace
}  // namespace regather
