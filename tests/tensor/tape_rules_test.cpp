// The rules of a tape: each is detected when it is broken.
#include "tensor/tape.h"
#include "tests/tensor/split.h"

namespace regather {
namespace {

using namespace toy;

using Recorder = regather::Run;  // inside a TEST, Run is gtest's

// Wrong: its backward reads an input that it does not declare.
struct Greedy final : Op {
  std::string_view name() const override { return "greedy"; }
  Types outputs(In in, Params) const override { return {in[0]}; }
  Saved saved(const Needs&) const override { return {}; }
  void forward(const Call& k) const override { std::fill_n(k.out[0].fresh(), k.out[0].numel(), 0.0F); }
  void backward(const BackwardCall& k) const override { k.din[0].fresh()[0] = k.in[0].data()[0]; }
};

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
