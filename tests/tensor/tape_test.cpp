// What a plan does to one block: numbers never change, reruns are minimal, and memory follows closed forms.
#include "tensor/tape.h"

#include <algorithm>
#include <tuple>

#include "tests/tensor/one_tape.h"

namespace regather {
namespace {

using namespace toy;

constexpr std::int64_t N = 12, C = 8, F = 32;

struct Setup {
  SavePlan plan;
  float dropout = 0;
  bool frozen = false, leaves = true, fetches = true;
  Allocator::Mode mode = Allocator::Mode::Real;
};
struct Result {
  Floats y, dx, dparams;
  Counts runs, reruns;
  double forward_flops = 0, recomputed_flops = 0;
  std::int64_t between = 0;                          // activation bytes from forward to backward
  std::int64_t host = 0;                             // bytes in host memory then
  std::int64_t forward_peak = 0, backward_peak = 0;  // of activations
  std::vector<std::string> lines;                    // of backward
  std::vector<Allocator::Event> events;
};

Tensor documents(OneTape& t) {  // two documents
  Tensor doc(t.device.memory, {N, 1}, Tag::Activations);
  for (std::int64_t i = 0; !t.device.meta() && i < N; ++i) doc.fresh()[i] = i < N / 3 ? 0.0F : 1.0F;
  return doc;
}

// Forward and backward of the toy block; nobody but the tape holds anything in between.
Result train(const Setup& s) {
  Result r;
  OneTape t(toy_block_params("", C, F, s.frozen), s.mode);
  t.device.memory.log = &r.events;
  {
    Tape tape(t.device, s.plan, {.seed = 3, .step = 1, .sequence = 5, .block = 2}, &t.offloader);
    {
      regather::Run run = t.recording(tape);
      Activations in{tape.input(t.activation({N, C}, 10), true), tape.input(documents(t), false)};
      const Activations y = ToyBlock(s.dropout).forward(run, in);
      in.clear();
      tape.outputs(y);
      if (!t.device.meta()) r.y = values(y[0]);
    }
    r.forward_peak = t.peak();
    if (s.leaves) tape.leave();
    r.host = t.live(Tag::Host);
    r.between = t.live();
    t.device.memory.restart_peaks();
    t.trace.lines.clear();
    if (s.fetches) tape.fetch();
    t.source.gather_again();
    Activations dx = tape.backward(t.params, {t.gradient({N, C}, 5), Tensor()}, t.grads);
    r.backward_peak = t.peak();
    if (!t.device.meta()) r.dx = values(dx.at(0));
    EXPECT_FALSE(dx.at(1)) << "documents have no gradient";
  }
  EXPECT_EQ(t.live(), 0);
  EXPECT_EQ(t.live(Tag::Workspace), 0);
  t.device.memory.log = nullptr;
  r.dparams = t.parameter_gradients();
  r.runs = t.trace.runs;
  r.reruns = t.trace.reruns;
  r.forward_flops = t.trace.forward_flops;
  r.recomputed_flops = t.trace.recomputed_flops;
  r.lines = t.trace.lines;
  return r;
}
Counts reruns(const SavePlan& plan, bool frozen = false) { return train({.plan = plan, .frozen = frozen}).reruns; }

std::vector<SavePlan> many_plans() {
  std::vector<SavePlan> plans{keep_all(), keep_costly(), verified(keep_costly()), verified(drop_all())};
  const std::vector<std::string> marks{"attn.qkv", "attn.core", "attn.out", "mid", "mlp.up"};
  for (unsigned bits = 0; bits < 32; ++bits)
    for (Order order : {Order::Lazy, Order::Ahead, Order::Eager}) {
      SavePlan plan = with(drop_all(), order);
      for (std::size_t i = 0; i < marks.size(); ++i)
        if (has(bits, i)) plan.marks[marks[i]] = Placement::Keep;
      plans.push_back(plan);
    }
  for (const std::string& mark : marks) {  // everything is kept but one
    plans.push_back(keep_all());
    plans.back().marks[mark] = Placement::Drop;
  }
  for (const Placement p : {Placement::Keep, Placement::Drop}) {  // some or all of what is kept waits in host memory
    plans.push_back({.unmarked = p, .inputs = Placement::Offload});
    plans.push_back({.unmarked = p, .marks = {{"mid", Placement::Offload}, {"mlp.up", Placement::Offload}}});
    plans.push_back({.unmarked = p,
                     .inputs = Placement::Offload,
                     .marks = {{"attn.core", Placement::Offload}, {"attn.qkv", Placement::Keep}},
                     .order = Order::Ahead,
                     .verify = true});
  }
  plans.push_back({.unmarked = Placement::Offload, .inputs = Placement::Offload, .order = Order::Eager});
  return plans;
}

// The bitwise tests compare plans with each other; this one keeps their common reference honest.
TEST(Tape, GradientsAreThoseOfFiniteDifferences) {
  for (const float rate : {0.0F, 0.25F}) {
    OneTape t(toy_block_params("", C, F, false));
    const auto loss = [&](std::int64_t nudged, float by, bool backward) {
      Tape tape(t.device, drop_all(), {.seed = 3});
      regather::Run run = t.recording(tape);
      Tensor x = t.activation({N, C}, 10);
      x.fresh()[nudged] += by;
      Activations in{tape.input(x, true), tape.input(documents(t), false)};
      const Activations y = ToyBlock(rate).forward(run, in);
      tape.outputs(y);
      const Tensor dy = t.gradient({N, C}, 5);
      double sum = 0;
      for (std::int64_t i = 0; i < N * C; ++i)
        sum += static_cast<double>(y[0].data()[i]) * static_cast<double>(dy.data()[i]);
      return std::pair{sum, backward ? values(tape.backward(t.params, {dy, Tensor()}, t.grads)[0]) : Floats()};
    };
    const Floats dx = loss(0, 0, true).second;
    for (const std::int64_t i : {std::int64_t{0}, std::int64_t{7}, std::int64_t{40}, N * C - 1}) {
      const double slope = (loss(i, 0.01F, false).first - loss(i, -0.01F, false).first) / 0.02;
      EXPECT_NEAR(slope, dx[static_cast<std::size_t>(i)], 5e-3 * (1 + std::abs(slope)));
    }
  }
}

TEST(Tape, EveryPlanGivesTheSameBits) {
  for (const float dropout : {0.0F, 0.25F})
    for (const bool frozen : {false, true}) {
      const Result reference = train({.plan = keep_all(), .dropout = dropout, .frozen = frozen});
      EXPECT_TRUE(std::ranges::any_of(reference.dx, [](float d) { return d != 0; }));
      for (const SavePlan& plan : many_plans()) {
        const Result r = train({.plan = plan, .dropout = dropout, .frozen = frozen});
        EXPECT_EQ(r.y, reference.y);
        EXPECT_EQ(r.dx, reference.dx);
        EXPECT_EQ(r.dparams, reference.dparams);
      }
    }
}

TEST(Tape, OffloadedValuesComeBackHoweverLateTheyAreAskedFor) {
  const Result reference = train({.plan = keep_all(), .dropout = 0.25F});
  for (const SavePlan& plan : many_plans())
    for (const bool leaves : {false, true})
      for (const bool fetches : {false, true}) {
        const Result r = train({.plan = plan, .dropout = 0.25F, .leaves = leaves, .fetches = fetches});
        EXPECT_EQ(r.dx, reference.dx);
        EXPECT_EQ(r.dparams, reference.dparams);
      }
}

TEST(Tape, WhatIsOffloadedIsKeptAndLeavesTheDevice) {
  constexpr std::int64_t f = sizeof(float) * N, doc = 1, x = C, mid = C, qkv = 3 * C, core = C, lse = 1, up = F;
  const auto offload = [](std::vector<std::string> marks, Placement inputs = Placement::Keep) {
    SavePlan plan = drop_all();
    plan.inputs = inputs;
    for (auto& mark : marks) plan.marks[mark] = Placement::Offload;
    return plan;
  };
  const auto expect = [](const SavePlan& plan, std::int64_t device, std::int64_t host, std::vector<std::string> kept) {
    const Result r = train({.plan = plan});
    EXPECT_EQ(r.between, device);
    EXPECT_EQ(r.host, host);
    EXPECT_EQ(r.reruns, reruns(keep_only(std::move(kept))));
  };
  expect(offload({"attn.qkv"}), f * (x + doc), f * qkv, {"attn.qkv"});
  expect(offload({"attn.core"}), f * (x + doc), f * (core + lse), {"attn.core"});  // with its statistics
  expect(offload({"mid", "attn.out"}), f * (x + doc), f * mid, {"mid"});           // nobody reads attn.out
  expect(offload({"mlp.up"}, Placement::Offload), 0, f * (x + doc + up), {"mlp.up"});
  const Result all = train({.plan = {.unmarked = Placement::Offload, .inputs = Placement::Offload}});
  EXPECT_EQ(all.between, 0);
  EXPECT_EQ(all.host, train({.plan = keep_all()}).between);
  EXPECT_EQ(all.reruns, Counts{});
  // Not told to leave: it has set out, and is there as well.
  EXPECT_EQ(train({.plan = offload({"mid"}), .leaves = false}).between, f * (x + doc + mid));
}

TEST(Tape, RerunsExactlyWhatBackwardLacks) {
  EXPECT_EQ(train({.plan = drop_all()}).runs,
            (Counts{{"norm", 2}, {"linear", 4}, {"attention", 1}, {"silu", 1}, {"add", 2}}));
  EXPECT_EQ(reruns(keep_all()), Counts{});
  // Never again: the down projection and the last residual, which nothing reads.
  EXPECT_EQ(reruns(drop_all()), (Counts{{"norm", 2}, {"linear", 3}, {"attention", 1}, {"silu", 1}, {"add", 1}}));
  EXPECT_EQ(reruns(keep_only({"attn.out"})),
            (Counts{{"norm", 2}, {"linear", 2}, {"attention", 1}, {"silu", 1}, {"add", 1}}));
  EXPECT_EQ(reruns(keep_only({"mid"})), (Counts{{"norm", 2}, {"linear", 2}, {"attention", 1}, {"silu", 1}}));
  // All that is read but the norms' outputs and silu's. The statistics of attention are kept with its output.
  EXPECT_EQ(reruns(keep_only({"mid", "attn.qkv", "attn.core", "mlp.up"})), (Counts{{"norm", 2}, {"silu", 1}}));
  SavePlan all_but_one = keep_all();
  all_but_one.marks["mlp.up"] = Placement::Drop;
  EXPECT_EQ(reruns(all_but_one), (Counts{{"linear", 1}}));
}

TEST(Tape, WhatIsCheapIsRunAgainWhereItsInputsAreHeldAnyway) {
  constexpr std::int64_t f = sizeof(float) * N;
  const Result costly = train({.plan = keep_costly()});
  EXPECT_EQ(costly.reruns, (Counts{{"norm", 2}, {"silu", 1}}));
  EXPECT_EQ(costly.between, f * (C + 1 + 3 * C + C + 1 + C + F));  // x, documents; qkv, core, statistics; mid; up
  SavePlan named = keep_costly();
  named.marks["mlp.up"] = Placement::Drop;  // silu's input comes back, then silu
  EXPECT_EQ(train({.plan = named}).reruns, (Counts{{"norm", 2}, {"linear", 1}, {"silu", 1}}));
  // Frozen: nobody reads what the norms and silu make.
  EXPECT_EQ(reruns(keep_costly(), true), Counts{});
}

// Nothing before it is trained, so it saves nothing: to run it again, its input would have to be held.
TEST(Tape, WhatIsCheapIsKeptWhereItsInputsAreNotHeld) {
  OneTape t(toy_block_params("", C, F, false));
  Tape tape(t.device, keep_costly());
  regather::Run run = t.recording(tape);
  Activations y{silu(run, silu(run, tape.input(t.activation({N, C}, 1), false)))};
  y = {linear(run, std::move(y[0]), ToyBlock::kProj)};
  tape.outputs(y);
  y.clear();
  EXPECT_EQ(t.live(), static_cast<std::int64_t>(sizeof(float)) * 2 * N * C);  // the input and what the second silu made
  tape.backward(t.params, {t.gradient({N, C}, 5)}, t.grads);
  EXPECT_EQ(t.trace.reruns, Counts{});
}

TEST(Tape, TheOrderOfRerunsDoesNotChangeWhatIsRerun) {
  for (const auto& kept : std::vector<std::vector<std::string>>{{}, {"mid"}, {"attn.qkv"}, {"attn.out", "mlp.up"}})
    for (const Order order : {Order::Ahead, Order::Eager})
      EXPECT_EQ(reruns(with(keep_only(kept), order)), reruns(keep_only(kept)));
}

TEST(Tape,
     FrozenParametersSaveNothing) {  // a frozen linear reads no input: the norms' and silu's outputs are not remade
  EXPECT_EQ(reruns(keep_only({"mid"}), true), (Counts{{"norm", 2}, {"linear", 2}, {"attention", 1}}));
  constexpr std::int64_t f = sizeof(float) * N;
  // x and mid for the norms; qkv, documents, core and statistics for attention; up for silu.
  EXPECT_EQ(train({.plan = keep_all(), .frozen = true}).between, f * (C + C + 3 * C + 1 + C + 1 + F));
  EXPECT_EQ(train({.plan = keep_all()}).between,
            f * (C + C + 3 * C + 1 + C + 1 + F) + f * (C + C + F));  // + norms', silu's
}

TEST(Tape, NothingIsSavedForWhatNeedsNoGradient) {
  OneTape t(toy_block_params("", C, F, true));
  Tape tape(t.device, keep_all());
  regather::Run run = t.recording(tape);
  Tensor h = linear(run, tape.input(t.activation({N, C}, 1), false), ToyBlock::kProj);
  h = silu(run, h);
  for (const auto& row : tape.report()) EXPECT_FALSE(row.saved) << row.name;
}

TEST(Tape, RecomputedFlopsAreThoseOfTheReruns) {
  const double norm = 8.0 * N * C, qkv = 2.0 * N * C * 3 * C, attention = 1.0 * N * N * 3 * C, proj = 2.0 * N * C * C;
  const double up = 2.0 * N * C * F, silu = 10.0 * N * F, down = up;
  const Result full = train({.plan = drop_all()});
  EXPECT_EQ(full.forward_flops, 2 * norm + qkv + attention + proj + up + silu + down);
  EXPECT_EQ(full.recomputed_flops, full.forward_flops - down);
  EXPECT_EQ(train({.plan = keep_only({"mid"})}).recomputed_flops, full.recomputed_flops - proj);
  EXPECT_EQ(train({.plan = keep_all()}).recomputed_flops, 0);
}

TEST(Tape, PeakOfActivationsFollowsTheClosedForm) {
  constexpr std::int64_t f = sizeof(float) * N;
  constexpr std::int64_t doc = 1, x = C, mid = C, n1 = C, qkv = 3 * C, core = C, lse = 1, n2 = C, up = F, act = F,
                         down = C, y = C;
  constexpr std::int64_t attention = n1 + qkv + core + lse, mlp = n2 + up + act;  // what backward reads of each half
  const auto between = [](const SavePlan& plan) { return train({.plan = plan}).between; };
  const auto forward = [](const SavePlan& plan) { return train({.plan = plan}).forward_peak; };
  const auto backward = [](const SavePlan& plan) { return train({.plan = plan}).backward_peak; };

  EXPECT_EQ(between(keep_all()), f * (x + doc + attention + mid + mlp));
  EXPECT_EQ(between(drop_all()), f * (x + doc));
  EXPECT_EQ(between(keep_only({"mid", "attn.core"})), f * (x + doc + mid + core + lse));
  EXPECT_EQ(between(keep_only({"attn.out"})), f * (x + doc + C));
  EXPECT_EQ(between(keep_only({"mid", "attn.out"})), f * (x + doc + mid)) << "with mid, nobody reads attn.out";
  SavePlan no_core = keep_all();
  no_core.marks["attn.core"] = Placement::Drop;
  EXPECT_EQ(between(no_core), between(keep_all()) - f * (core + lse)) << "a mark drops the siblings, too";

  EXPECT_EQ(forward(keep_all()), f * (x + doc + attention + mid + mlp + down + y));
  EXPECT_EQ(forward(drop_all()), f * (x + doc + mid + up + act));  // silu: its input and output, x and mid
  EXPECT_EQ(forward(keep_only({"attn.qkv"})), f * (x + doc + qkv + mid + up + act));

  EXPECT_EQ(backward(keep_all()), f * (x + doc + attention + mid + mlp));
  EXPECT_EQ(backward(drop_all()), f * (x + doc + attention + mid + mlp));  // the first backward needs the last value
  EXPECT_EQ(backward(with(drop_all(), Order::Eager)), f * (x + doc + attention + mid + mlp));
  EXPECT_EQ(backward(keep_only({"mid"})), f * (x + doc + mid + std::max(attention, mlp)));  // lazy: one half at a time
  EXPECT_EQ(backward(with(keep_only({"mid"}), Order::Eager)), f * (x + doc + mid + attention + mlp));
  // Ahead: what needs no matrix is there before it is needed: the norms, and attention's outputs, from the kept qkv.
  EXPECT_EQ(backward(keep_only({"attn.qkv", "mid"})), f * (x + doc + qkv + mid + std::max(n1 + core + lse, mlp)));
  EXPECT_EQ(backward(with(keep_only({"attn.qkv", "mid"}), Order::Ahead)), f * (x + doc + attention + mid + mlp));
  static_assert(mlp > n1 + core + lse);
}

TEST(Tape, StoragelessRunPredictsEveryAllocation) {
  for (const SavePlan& plan : many_plans()) {
    const Result real = train({.plan = plan, .dropout = 0.1F});
    Result meta = train({.plan = plan, .dropout = 0.1F, .mode = Allocator::Mode::Meta});
    EXPECT_EQ(meta.events, real.events);  // allocations and releases of every kind, in order
    EXPECT_EQ(meta.backward_peak, real.backward_peak);
    EXPECT_EQ(meta.reruns, real.reruns);
    EXPECT_EQ(meta.recomputed_flops, real.recomputed_flops);
    std::vector<std::string> lines = real.lines;
    std::erase(lines, "wait");  // no parameter is read
    EXPECT_EQ(meta.lines, lines);
  }
}

// What is enqueued before the first use of a matrix: what a gather hides. The last of each is the one that waits.
TEST(Tape, RunsInTheShadowOfTheGatherWhatNeedsNoMatrix) {
  using Lines = std::vector<std::string>;
  const auto shadow = [](const SavePlan& plan) {
    const Lines lines = train({.plan = plan}).lines;
    return Lines(lines.begin(), std::ranges::find(lines, "wait"));
  };
  EXPECT_EQ(shadow(drop_all()), (Lines{"backward add", "rerun norm", "rerun linear"}));
  EXPECT_EQ(shadow(with(drop_all(), Order::Eager)), (Lines{"rerun norm", "rerun linear"}));
  EXPECT_EQ(shadow(keep_only({"attn.qkv"})), (Lines{"backward add", "rerun attention", "rerun linear"}));
  EXPECT_EQ(shadow(keep_only({"attn.qkv", "mid", "mlp.up"})), (Lines{"backward add", "rerun silu", "backward linear"}));
  EXPECT_EQ(shadow(with(keep_only({"attn.qkv", "mid", "mlp.up"}), Order::Ahead)),
            (Lines{"rerun norm", "rerun attention", "rerun norm", "rerun silu", "backward add", "backward linear"}));
  EXPECT_EQ(shadow(with(keep_only({"attn.qkv", "attn.out"}), Order::Ahead)),
            (Lines{"rerun norm", "rerun attention", "rerun add", "rerun norm", "backward add", "rerun linear"}));
}

TEST(Tape, RerunsFollowTheOrderOfRecording) {
  using Lines = std::vector<std::string>;
  Lines lines = train({.plan = drop_all()}).lines;
  std::erase(lines, "wait");
  EXPECT_EQ(lines, (Lines{"backward add", "rerun norm", "rerun linear", "rerun attention", "rerun linear", "rerun add",
                          "rerun norm", "rerun linear", "rerun silu", "backward linear", "backward silu",
                          "backward linear", "backward norm", "backward add", "backward linear", "backward attention",
                          "backward linear", "backward norm"}));
}

TEST(Tape, ReportNamesEveryValueAndItsState) {
  OneTape t(toy_block_params("", C, F, false));
  Tape tape(t.device, keep_only({"mid"}));
  regather::Run run = t.recording(tape);
  Activations in{tape.input(t.activation({N, C}, 1), true), tape.input(documents(t), false)};
  tape.outputs(ToyBlock().forward(run, in));
  const auto rows = tape.report();
  ASSERT_EQ(rows.size(), 2U + 2 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1);  // inputs, then every output
  std::int64_t kept = 0;
  for (const auto& row : rows) {
    if (row.state == ValueState::Kept) kept += row.bytes;
    if (row.name == "mid") {
      EXPECT_EQ(std::tuple(row.producer, row.bytes, row.saved, row.flops, row.state),
                std::tuple("add", 4 * N * C, true, 0.0, ValueState::Kept));
    }
    if (row.name == "attn.out") {
      EXPECT_EQ(std::tuple(row.producer, row.saved, row.state), std::tuple("linear", false, ValueState::Dropped));
    }
    if (row.name == "mlp.up") {
      EXPECT_EQ(std::tuple(row.saved, row.flops, row.state), std::tuple(true, 2.0 * N * C * F, ValueState::Dropped));
    }
  }
  EXPECT_EQ(kept, 4 * N * (C + 1 + C));
}

TEST(Tape, ReplayGivesTheOutputsAgainAndLeavesWhatItIsTold) {
  for (const float dropout : {0.0F, 0.25F})
    for (const Retain retain : {Retain::Nothing, Retain::Saved}) {
      const Result reference = train({.plan = keep_all(), .dropout = dropout});
      OneTape t(toy_block_params("", C, F, false));
      Tape tape(t.device, drop_all(), {.seed = 3, .step = 1, .sequence = 5, .block = 2});
      regather::Run run = t.recording(tape);
      Tensor x = t.activation({N, C}, 10), doc = documents(t);
      {
        Activations in{tape.input(x, true), tape.input(doc, false)};
        tape.outputs(ToyBlock(dropout).forward(run, in));
      }
      tape.drop_inputs();
      const std::int64_t before = t.live();
      tape.bind_inputs({x, doc});
      Activations y = tape.replay(t.params, retain);
      EXPECT_EQ(values(y.at(0)), reference.y);
      EXPECT_EQ(y.at(0).tape, 0U) << "the next block's tape has to accept it";
      y.clear();
      const std::int64_t saved = 4 * N * (C + 3 * C + C + 1 + C + C + F + F);  // n1 qkv core lse mid n2 up act
      EXPECT_EQ(t.live() - before, retain == Retain::Saved ? saved : 0);
      const Counts whole{{"norm", 2}, {"linear", 4}, {"attention", 1}, {"silu", 1}, {"add", 2}};
      t.trace.reruns.erase("dropout");
      EXPECT_EQ(t.trace.reruns, whole);
      t.trace.reruns.clear();
      Activations dx = tape.backward(t.params, {t.gradient({N, C}, 5), Tensor()}, t.grads);
      EXPECT_EQ(values(dx[0]), reference.dx);
      EXPECT_EQ(t.parameter_gradients(), reference.dparams);
      t.trace.reruns.erase("dropout");
      EXPECT_EQ(t.trace.reruns, retain == Retain::Saved ? Counts{} : reruns(drop_all()));
    }
}

TEST(Tape, EvaluationHasNoTapeAndKeepsNothing) {
  OneTape t(toy_block_params("", C, F, false));
  const Floats trained = train({.plan = keep_all()}).y;
  t.device.memory.restart_peaks();
  Activations in{t.activation({N, C}, 10), documents(t)};
  regather::Run run = t.evaluating();
  const Activations y = ToyBlock().forward(run, in);
  EXPECT_EQ(values(y[0]), trained);
  EXPECT_EQ(t.peak(), 4 * N * (C + 1 + C + F + F));  // x, documents, mid, up, act
  in.clear();
  EXPECT_EQ(t.live(), 4 * N * (C + 1));
}

}  // namespace
}  // namespace regather
