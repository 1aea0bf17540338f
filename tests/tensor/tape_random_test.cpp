// Random numbers of operations: the same in forward, in a rerun and without a tape.
#include "tensor/tape.h"
#include "tests/tensor/one_tape.h"

namespace regather {
namespace {

using namespace toy;

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

}  // namespace
}  // namespace regather
