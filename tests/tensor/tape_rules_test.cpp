// What holds for any operations and any graph: shared values and gradients, views, random numbers, losses; and the
// rules that are detected when they are broken.
#include <algorithm>
#include <stdexcept>

#include "tensor/tape.h"
#include "tests/tensor/one_tape.h"

namespace regather {
namespace {

using namespace toy;

using Recorder = regather::Run;  // inside a TEST, Run is gtest's
using Types = std::vector<ValueType>;
using In = std::span<const ValueType>;
using Params = std::span<const Shape>;

// x -> (x * x, 2 x). Saves x. What it does besides is set from outside: that is what breaks the rules.
struct Switches {
  int throw_at = 0;  // the n-th forward from now throws
  int forwards = 0;
  bool noisy = false;  // numbers depend on how often it ran
  bool grows = false;  // so does the shape
};
struct Split final : Op {
  explicit Split(Switches* switches = nullptr) : switches_(switches) {}
  std::string_view name() const override { return "split"; }
  Types outputs(In in, Params) const override {
    const bool wider = switches_ && switches_->grows && switches_->forwards > 0;
    return {wider ? ValueType{in[0].shape.with_last(in[0].shape.cols() + 1)} : in[0], in[0]};
  }
  Saved saved(const Needs&) const override { return {.inputs = 1, .outputs = 0}; }
  void forward(const Call& k) const override {
    const float noise = switches_ && switches_->noisy ? static_cast<float>(switches_->forwards) : 0.0F;
    if (switches_) ++switches_->forwards;
    if (switches_ && switches_->throw_at > 0 && --switches_->throw_at == 0) throw std::runtime_error("split failed");
    for (std::int64_t i = 0; i < k.in[0].numel(); ++i) {
      const float x = k.in[0].data()[i];
      k.out[0].fresh()[i] = x * x + noise;
      k.out[1].fresh()[i] = 2 * x;
    }
  }
  void backward(const BackwardCall& k) const override {
    for (std::int64_t i = 0; i < k.in[0].numel(); ++i) {
      const float a = k.dout[0] ? k.dout[0].data()[i] : 0, b = k.dout[1] ? k.dout[1].data()[i] : 0;
      k.din[0].fresh()[i] = 2 * k.in[0].data()[i] * a + 2 * b;
    }
  }

 private:
  Switches* switches_;
};
Activations split(Run& r, Tensor x, Switches* s = nullptr) {
  return r.apply(std::make_unique<Split>(s), {std::move(x)});
}

// Wrong: its backward reads an input that it does not declare.
struct Greedy final : Op {
  std::string_view name() const override { return "greedy"; }
  Types outputs(In in, Params) const override { return {in[0]}; }
  Saved saved(const Needs&) const override { return {}; }
  void forward(const Call& k) const override { std::fill_n(k.out[0].fresh(), k.out[0].numel(), 0.0F); }
  void backward(const BackwardCall& k) const override { k.din[0].fresh()[0] = k.in[0].data()[0]; }
};

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

constexpr std::int64_t kThree = 3;
Shape row(std::int64_t n = kThree) { return {1, n}; }

// ---- graphs ---------------------------------------------------------------------------------------------------------

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

// ---- random numbers -------------------------------------------------------------------------------------------------

Floats mask(OneTape& t, const RngKey& key, int dropouts_before) {
  Tape tape(t.device, keep_all(), key);
  auto r = t.recording(tape);
  Tensor x = tape.input(t.activation({8, 8}, 3), true);
  for (int i = 0; i < dropouts_before; ++i) dropout(r, x, 0.5F);
  Floats y = values(dropout(r, x, 0.5F));
  for (float& v : y) v = v != 0 ? 1 : 0;
  return y;
}

TEST(TapeRandom, EveryDropoutHasItsOwnMask) {
  OneTape t;
  const std::vector<Floats> masks{mask(t, {.seed = 1}, 0),
                                  mask(t, {.seed = 1}, 1),
                                  mask(t, {.seed = 1, .block = 1}, 0),
                                  mask(t, {.seed = 1, .step = 1}, 0),
                                  mask(t, {.seed = 1, .sequence = 1}, 0),
                                  mask(t, {.seed = 2}, 0)};
  for (std::size_t i = 0; i < masks.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(masks[i], masks[j]) << i << " and " << j;
  EXPECT_EQ(mask(t, {.seed = 1}, 1), masks[1]) << "the same key gives the same mask";
}

TEST(TapeRandom, ARerunDrawsTheSameMask) {  // the mask is seen by silu, which saves what dropout made
  Floats reference;
  for (const SavePlan& plan : {keep_all(), verified(drop_all())}) {
    OneTape t;
    Tape tape(t.device, plan, {.seed = 7, .step = 2, .sequence = 9, .block = 3});
    {
      auto r = t.recording(tape);
      Tensor h = silu(r, dropout(r, silu(r, tape.input(t.activation({8, 8}, 3), true)), 0.5F));
      tape.outputs({silu(r, dropout(r, h, 0.25F))});
    }
    const Floats dx = values(tape.backward(t.params, {t.gradient({8, 8}, 4)}, t.grads)[0]);
    if (reference.empty()) reference = dx;
    EXPECT_EQ(dx, reference);
    EXPECT_EQ(t.trace.reruns["dropout"], plan.unmarked == Placement::Drop ? 2 : 0);
  }
}

TEST(TapeRandom, ARunWithoutATapeDrawsWhatOneWithATapeDraws) {
  OneTape t;
  const RngKey key{.seed = 5, .step = 1, .sequence = 2, .block = 4};
  auto r = t.evaluating(key);
  const Tensor x = t.activation({8, 8}, 3);
  dropout(r, x, 0.5F);
  Floats second = values(dropout(r, x, 0.5F));
  for (float& v : second) v = v != 0 ? 1 : 0;
  EXPECT_EQ(second, mask(t, key, 1));
}

// ---- losses ---------------------------------------------------------------------------------------------------------

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

// ---- rules ----------------------------------------------------------------------------------------------------------

// What `body` says that it did wrong, on a tape with one input of three numbers.
template <class Body>
std::string complaint(const SavePlan& plan, Body body) {
  OneTape t;
  Tape tape(t.device, plan);
  auto r = t.recording(tape);
  Tensor x = tape.input(t.activation(row(), 3), true);
  return message_of([&] { body(t, tape, r, x); });
}
void finish(OneTape& t, Tape& tape, const Tensor& y) {
  tape.outputs({y});
  tape.backward(t.params, {t.gradient(row(), 4)}, t.grads);
}

TEST(TapeRules, ValuesAreNotModifiedInPlace) {
  EXPECT_EQ(complaint(keep_all(),
                      [](OneTape&, Tape&, Recorder& r, Tensor x) {
                        x.mutate();
                        split(r, x);
                      }),
            "split: value 'input or constant' was modified in place after it was recorded");
  EXPECT_EQ(complaint(keep_all(),
                      [](OneTape& t, Tape& tape, Recorder& r, Tensor x) {
                        Tensor h = r.mark("h", split(r, x)[0]), y = split(r, h)[0];
                        h.mutate();
                        finish(t, tape, y);
                      }),
            "value 'h' was modified in place while the tape held it");
}

TEST(TapeRules, BackwardSeesOnlyWhatItDeclares) {
  EXPECT_EQ(
      complaint(keep_all(), [](OneTape& t, Tape& tape, Recorder& r,
                               const Tensor& x) { finish(t, tape, r.apply(std::make_unique<Greedy>(), {x})[0]); }),
      "greedy: read of an undefined tensor (a value that saved() does not declare?)");
}

TEST(TapeRules, AnotherTapesValueIsRefused) {
  EXPECT_EQ(complaint(keep_all(),
                      [](OneTape& t, Tape&, Recorder& r, const Tensor&) {
                        Tape other(t.device, keep_all());
                        split(r, other.input(t.activation(row(), 3), true));
                      }),
            "split: the tensor is not a value of this tape");
  EXPECT_EQ(complaint(keep_all(),
                      [](OneTape& t, Tape& tape, Recorder&, const Tensor&) { tape.outputs({t.activation(row(), 3)}); }),
            "outputs: the tensor is not a value of this tape");
}

TEST(TapeRules, ATensorFromOutsideIsAConstant) {
  Floats reference;
  for (const SavePlan& plan : {keep_all(), drop_all()}) {
    OneTape t;
    Tape tape(t.device, plan);
    {
      auto r = t.recording(tape);
      Tensor constant = t.activation(row(), 8);
      Tensor h = split(r, add(r, split(r, tape.input(t.activation(row(), 3), true))[0], constant))[0];
      constant.reset();  // the tape has it
      tape.outputs({h});
    }
    const Floats dx = values(tape.backward(t.params, {t.gradient(row(), 4)}, t.grads)[0]);
    if (reference.empty()) reference = dx;
    EXPECT_EQ(dx, reference);
    EXPECT_EQ(t.live(), 0);
  }
}

TEST(TapeRules, DroppedInputsHaveToBeBound) {
  const auto two = [](OneTape& t, Tape& tape, Recorder& r, const Tensor& x) {
    Tensor y = split(r, split(r, x)[0])[0];
    tape.drop_inputs();
    finish(t, tape, y);
  };
  EXPECT_EQ(complaint(drop_all(), two), "a dropped block input was not bound before backward");
  EXPECT_EQ(complaint(drop_all(), [](OneTape& t, Tape& tape, Recorder&,
                                     const Tensor&) { tape.bind_inputs({t.activation(row(4), 3)}); }),
            "bind_inputs: input 0 is [1, 4], it was [1, 3] in forward");
  EXPECT_EQ(complaint(drop_all(), [](OneTape&, Tape& tape, Recorder&, const Tensor&) { tape.bind_inputs({}); }),
            "bind_inputs: 0 values for 1 inputs");
}

TEST(TapeRules, ATapeGoesBackwardOnce) {
  EXPECT_EQ(complaint(keep_all(),
                      [](OneTape& t, Tape& tape, Recorder& r, const Tensor& x) {
                        finish(t, tape, split(r, x)[0]);
                        tape.backward(t.params, {Tensor()}, t.grads);
                      }),
            "backward: this tape is spent");
  EXPECT_EQ(complaint(keep_all(),
                      [](OneTape& t, Tape& tape, Recorder& r, const Tensor& x) {
                        finish(t, tape, split(r, x)[0]);
                        tape.replay(t.params, Retain::Nothing);
                      }),
            "replay: this tape is spent");
  EXPECT_EQ(complaint(keep_all(),
                      [](OneTape& t, Tape& tape, Recorder& r, const Tensor& x) {
                        finish(t, tape, split(r, x)[0]);
                        split(r, x);
                      }),
            "record: this tape is no longer recording");
}

TEST(TapeRules, GradientsHaveTheShapeOfTheirOutputs) {
  EXPECT_EQ(complaint(keep_all(),
                      [](OneTape& t, Tape& tape, Recorder& r, const Tensor& x) {
                        tape.outputs({split(r, x)[0]});
                        tape.backward(t.params, {t.gradient({3}, 4)}, t.grads);
                      }),
            "backward: gradient 0 is [3], the output is [1, 3]");
  EXPECT_EQ(complaint(keep_all(),
                      [](OneTape& t, Tape& tape, Recorder& r, const Tensor& x) {
                        tape.outputs({split(r, x)[0]});
                        tape.backward(t.params, {}, t.grads);
                      }),
            "backward: 0 gradients for 1 outputs");
}

TEST(TapeRules, HiddenStateIsCaughtByVerification) {
  for (const bool verify : {false, true}) {
    Switches s{.noisy = true};
    SavePlan plan = drop_all();
    plan.verify = verify;
    EXPECT_EQ(
        complaint(plan, [&](OneTape& t, Tape& tape, Recorder& r,
                            const Tensor& x) { finish(t, tape, split(r, r.mark("mlp.act", split(r, x, &s)[0]))[0]); }),
        verify ? "operation split made other numbers when run again: 'mlp.act'" : "nothing thrown");
  }
}

TEST(TapeRules, AnotherShapeInARerunNamesTheOperationAndBothShapes) {
  Switches s{.grows = true};
  EXPECT_EQ(complaint(drop_all(),
                      [&](OneTape& t, Tape& tape, Recorder& r, const Tensor& x) {
                        finish(t, tape, split(r, r.mark("mlp.act", split(r, x, &s)[0]))[0]);
                      }),
            "rerun of split made [1, 4] where forward made [1, 3] ('mlp.act')");
}

TEST(TapeRules, ErrorsSayWhatRan) {
  const auto chain = [](Switches* s) {
    return [s](OneTape& t, Tape& tape, Recorder& r, const Tensor& x) {
      finish(t, tape, split(r, r.mark("mlp.act", split(r, x, s)[0]))[0]);
    };
  };
  Switches in_forward{.throw_at = 1}, in_rerun{.throw_at = 2};
  EXPECT_EQ(complaint(drop_all(), chain(&in_forward)), "split: split failed");
  EXPECT_EQ(complaint(drop_all(), chain(&in_rerun)), "rerun of split (mlp.act): split failed");
}

TEST(TapeRules, AfterAnExceptionTheTapeHoldsNothing) {
  for (const bool in_replay : {false, true})
    for (const SavePlan& plan : {drop_all(), keep_only({"b"}), with(drop_all(), Order::Eager)})
      for (int at = 5; at <= 7; ++at) {  // 4 runs, then reruns
        OneTape t;
        const std::int64_t before = t.live();
        Switches s{.throw_at = at};
        Tape tape(t.device, plan);
        {
          auto r = t.recording(tape);
          Tensor h = split(r, tape.input(t.activation(row(), 3), true), &s)[0];
          h = r.mark("a", split(r, h, &s)[0]);
          h = r.mark("b", split(r, h, &s)[0]);
          tape.outputs({split(r, h, &s)[0]});
        }
        const std::string what = message_of([&] {
          if (in_replay) tape.replay(t.params, Retain::Saved);
          tape.backward(t.params, {t.gradient(row(), 4)}, t.grads);
        });
        EXPECT_EQ(contains(what, "split failed"), s.throw_at == 0) << what;
        EXPECT_EQ(t.live(), before);
        EXPECT_EQ(t.live(Tag::Workspace), 0);
        EXPECT_EQ(message_of([&] { tape.backward(t.params, {Tensor()}, t.grads); }), "backward: this tape is spent");
      }
}

TEST(TapeRules, RunningOutOfMemoryNamesTheOperation) {
  OneTape t;
  Tape tape(t.device, drop_all());
  {
    auto r = t.recording(tape);
    Tensor h = tape.input(t.activation(row(1000), 3), true);
    for (int i = 0; i < 3; ++i) h = r.mark("h" + std::to_string(i), split(r, h)[0]);
    tape.outputs({h});
  }
  Tensor dy = t.gradient(row(1000), 4);
  const std::int64_t before = t.live();
  t.device.memory.set_limit(t.device.memory.live_total() + 4000);
  try {
    tape.backward(t.params, {dy}, t.grads);
    ADD_FAILURE() << "there was room for two outputs";
  } catch (const OutOfMemory& e) {
    EXPECT_TRUE(contains(e.what(), "rerun of split (h0): out of memory: split asks for")) << e.what();
  }
  EXPECT_EQ(t.live(), before - 4000);  // not even the input
}

}  // namespace
}  // namespace regather
