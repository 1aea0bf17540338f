// What holds for any operations and any graph: shared values and gradients, views.
#include "tensor/tape.h"
#include "tests/tensor/split.h"

namespace regather {
namespace {

using namespace toy;

using Recorder = regather::Run;  // inside a TEST, Run is gtest's

// As many times wider (or narrower); saves nothing.
template <int kTimes>
struct Resize final : Op {
  std::string_view name() const override { return "resize"; }
  Types outputs(In in, Params) const override {
    const std::int64_t c = in[0].shape.cols();
    return {{in[0].shape.with_last(kTimes > 0 ? c * kTimes : c / -kTimes)}};
  }
  Saved saved(const Needs&) const override { return {}; }
  static void cycle(const Tensor& from, Tensor to) {
    for (std::int64_t i = 0; i < to.numel(); ++i) to.fresh()[i] = from.data()[i % from.numel()];
  }
  void forward(const Call& k) const override { cycle(k.in[0], k.out[0]); }
  void backward(const BackwardCall& k) const override { cycle(k.dout[0], k.din[0]); }
};

TEST(TapeGraph, AValueWithManyReadersIsRemadeOnce) {
  Floats reference;
  for (const SavePlan& plan :
       {keep_all(), drop_all(), with(drop_all(), Order::Ahead), with(drop_all(), Order::Eager)}) {
    OneTape t;
    Tape tape(t.device, plan);
    {
      auto r = t.recording(tape);
      Tensor x = tape.input(t.activation(row(), 3), true);
      Tensor h = split(r, x)[0];
      Activations p = split(r, h), q = split(r, h);
      Tensor y =
          add(r, add(r, p[0], q[1]), add(r, h, h));  // q[0] and p[1] get no gradient; h is read twice by one operation
      tape.outputs({y});
    }
    const Floats dx = values(tape.backward(t.params, {t.gradient(row(), 4)}, t.grads)[0]);
    if (reference.empty()) reference = dx;
    EXPECT_EQ(dx, reference);
    EXPECT_EQ(t.trace.reruns["split"], plan.unmarked == Placement::Drop ? 1 : 0);
    EXPECT_EQ(t.live(), 0);
  }
  // y = h^2 + 2h + 2h with h = x^2
  OneTape t;
  const Tensor x = t.activation(row(), 3), dy = t.gradient(row(), 4);
  for (int i = 0; i < 3; ++i) {
    const float h = x.data()[i] * x.data()[i];
    EXPECT_NEAR(reference[static_cast<std::size_t>(i)], dy.data()[i] * (2 * h + 4) * 2 * x.data()[i], 1e-6);
  }
}

TEST(TapeGraph, OneOutputKeptAndOneDroppedAreBothRight) {
  Floats reference;
  for (const bool kept : {true, false})
    for (int dropped = 0; dropped < 2; ++dropped) {
      OneTape t;
      SavePlan plan = keep_all();
      if (!kept) plan.marks["it"] = Placement::Drop;
      Tape tape(t.device, plan);
      {
        auto r = t.recording(tape);
        Activations p = split(r, tape.input(t.activation(row(), 3), true));
        r.mark("it", p[static_cast<std::size_t>(dropped)]);
        tape.outputs({add(r, split(r, p[0])[0], split(r, p[1])[0])});
      }
      const Floats dx = values(tape.backward(t.params, {t.gradient(row(), 4)}, t.grads)[0]);
      if (reference.empty()) reference = dx;
      EXPECT_EQ(dx, reference);
      EXPECT_EQ(t.trace.reruns["split"], kept ? 0 : 1);
    }
}

// 3 x^2 + 6 x in a shape where dy reaches a, b and the caller: whoever adds must not write into it.
TEST(TapeGraph, SharedGradientsAreNotWrittenTo) {
  OneTape t;
  Tape tape(t.device, drop_all());
  const Tensor x = t.activation(row(), 3), dy = t.gradient(row(), 4);
  const Floats before = values(dy);
  {
    auto r = t.recording(tape);
    Activations ab = split(r, tape.input(x, true));
    Tensor sum = add(r, split(r, ab[0])[1], split(r, ab[1])[1]);
    tape.outputs({add(r, add(r, ab[0], ab[1]), sum)});
  }
  const Tensor dx = tape.backward(t.params, {dy}, t.grads)[0];
  for (int i = 0; i < 3; ++i) EXPECT_NEAR(dx.data()[i], dy.data()[i] * (6 * x.data()[i] + 6), 1e-5);
  EXPECT_EQ(values(dy), before);
}

TEST(TapeGraph, AGradientThatNobodySharesIsAddedToInPlace) {
  OneTape t;
  Tape tape(t.device, keep_all());
  {
    auto r = t.recording(tape);
    Tensor x = tape.input(t.activation(row(100), 3), true);
    Tensor a = split(r, x)[0], b = split(r, x)[0], c = split(r, x)[0];
    tape.outputs({a, b, c});
  }
  Activations dy{t.gradient(row(100), 4), t.gradient(row(100), 5), t.gradient(row(100), 6)};
  t.device.memory.restart_peaks();
  tape.backward(t.params, std::move(dy), t.grads);
  EXPECT_EQ(t.peak(Tag::Workspace), 400 * (3 + 1));  // three from outside; each gives way as the sum for x comes
}

TEST(TapeGraph, OutputsWithoutAGradientCostNothing) {
  OneTape t;
  Tape tape(t.device, drop_all());
  {
    auto r = t.recording(tape);
    Tensor h = split(r, tape.input(t.activation(row(), 3), true))[0];
    tape.outputs({split(r, h)[0], split(r, split(r, h)[0])[0]});
  }
  tape.backward(t.params, {t.gradient(row(), 4), Tensor()}, t.grads);
  EXPECT_EQ(t.trace.reruns["split"], 1);  // h; nothing of the other output
  EXPECT_EQ(std::ranges::count(t.trace.lines, "backward split"), 2);
}

TEST(TapeGraph, AnInputMayBeAnOutputAndAnOutputMayBeThereTwice) {
  OneTape t;
  for (const SavePlan& plan : {keep_all(), drop_all()}) {
    Tape tape(t.device, plan);
    {
      auto r = t.recording(tape);
      Tensor x = tape.input(t.activation(row(), 3), true);
      Tensor y = split(r, x)[1];
      tape.outputs({x, y, y});
    }
    const Tensor a = t.gradient(row(), 4), b = t.gradient(row(), 5), c = t.gradient(row(), 6);
    const Floats dx = values(tape.backward(t.params, {a, b, c}, t.grads)[0]);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_FLOAT_EQ(dx[i], a.data()[i] + 2 * (b.data()[i] + c.data()[i]));
  }
}

TEST(TapeGraph, AViewIsTheSameValueInAnotherShape) {
  Floats reference;
  std::vector<Allocator::Event> events;
  for (const SavePlan& plan : {keep_all(), drop_all(), verified(drop_all()), with(drop_all(), Order::Eager)}) {
    OneTape t;
    Tape tape(t.device, plan);
    const Tensor x = t.activation({2, 3}, 3);
    {
      auto r = t.recording(tape);
      Tensor h = split(r, tape.input(x, true))[0];  // [2, 3]
      Tensor flat = split(r, h.view({6}))[1];       // read as [6] and ...
      Tensor tall = split(r, h.view({3, 2}))[0];    // ... as [3, 2]
      Tensor sum = add(r, flat.view({2, 3}), h);    // identities pass gradients through views
      tape.outputs({add(r, sum.view({3, 2}), tall).view({6, 1})});
    }
    tape.drop_inputs();
    tape.bind_inputs({x});
    EXPECT_EQ(tape.replay(t.params, Retain::Nothing)[0].shape(), (Shape{6, 1}));
    Tensor dx = tape.backward(t.params, {t.gradient({6, 1}, 4)}, t.grads)[0];
    EXPECT_EQ(dx.shape(), (Shape{2, 3}));
    if (reference.empty()) reference = values(dx);
    EXPECT_EQ(values(dx), reference);
    for (int i = 0; i < 6; ++i) {  // y = 3 h + h^2 with h = x^2
      const float h = x.data()[i] * x.data()[i];
      EXPECT_NEAR(dx.data()[i], t.gradient({6}, 4).data()[i] * (3 + 2 * h) * 2 * x.data()[i], 1e-6);
    }
  }
}

// Neither order always wins: lazy holds h, which is wide, for the late rerun of b while w, which is wide too, is there.
TEST(TapeGraph, LazyIsNotAlwaysTheLowestPeak) {
  const auto run = [](Order order) {
    OneTape t;
    Tape tape(t.device, with(drop_all(), order));
    {
      auto r = t.recording(tape);
      const auto wide = [&](Tensor x) { return r.apply(std::make_unique<Resize<16>>(), {std::move(x)})[0]; };
      const auto narrow = [&](Tensor x) { return r.apply(std::make_unique<Resize<-16>>(), {std::move(x)})[0]; };
      Tensor h = wide(tape.input(t.activation(row(4), 3), true));
      Tensor side = split(r, narrow(h))[0];
      Tensor w = wide(split(r, narrow(h))[0]);
      tape.outputs({add(r, narrow(split(r, w)[0]), side)});
    }
    t.device.memory.restart_peaks();
    const Floats dx = values(tape.backward(t.params, {t.gradient(row(4), 4)}, t.grads)[0]);
    EXPECT_EQ(t.trace.reruns["split"], 1);
    return std::pair{t.peak(), dx};
  };
  const auto lazy = run(Order::Lazy), eager = run(Order::Eager);
  EXPECT_EQ(lazy.second, eager.second);
  EXPECT_EQ(lazy.first, 4 * (64 + 4 + 4 + 64));  // h, a, its square, w
  EXPECT_EQ(eager.first, 4 * (4 + 4 + 4 + 64));  // b, a, its square, w
}

TEST(TapeGraph, ALongTapeNeedsNoStackAndLinearTime) {
  OneTape t;
  t.trace.keep_lines = false;
  Tape tape(t.device, drop_all());
  {
    auto r = t.recording(tape);
    Tensor h = tape.input(t.activation(row(2), 3), true);
    for (int i = 0; i < 50000; ++i) h = split(r, h)[1];
    tape.outputs({h});
  }
  EXPECT_EQ(t.live(), 8);  // its input
  tape.backward(t.params, {t.gradient(row(2), 4)}, t.grads);
  EXPECT_EQ(t.trace.reruns["split"], 49999);
  EXPECT_EQ(t.live(), 0);
}

}  // namespace
}  // namespace regather
