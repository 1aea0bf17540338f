#include "ckpt/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <ostream>

#include "tensor/error.h"

namespace regather {

void PrintTo(const Action& a, std::ostream* out) {
  *out << name_of(a.pass) << " of " << (a.part == kEmbedding ? "embedding" : a.part == kHead ? "head" : "block ");
  if (a.part >= 0) *out << a.part;
  *out << ", micro-batch " << a.micro_batch << (a.keep_input ? "" : ", drops its input")
       << (a.keep_activations ? ", keeps all" : "");
}

namespace {

constexpr auto kBatchMajor = AccumulationOrder::BatchMajor, kLayerMajor = AccumulationOrder::LayerMajor;
enum class Keeps { Input, Nothing, All };

Action forward(int part, Keeps keeps = Keeps::Input, int m = 0) {
  return {Pass::Forward, part, m, keeps != Keeps::Nothing, keeps == Keeps::All};
}
Action replay(int part, int m = 0) { return {Pass::Replay, part, m}; }
Action backward(int part, int m = 0) { return {Pass::Backward, part, m}; }

// Every way to cut `blocks` blocks into segments; the first is the empty one, which keeps every input.
std::vector<SegmentStarts> all_segments(int blocks) {
  std::vector<SegmentStarts> all{{}};
  for (unsigned cuts = 0; cuts < 1U << (blocks - 1); ++cuts) {
    SegmentStarts starts{0};
    for (int b = 1; b < blocks; ++b)
      if ((cuts >> (b - 1)) & 1U) starts.push_back(b);
    all.push_back(starts);
  }
  return all;
}

template <class F>
void for_all_schedules(F f) {
  for (int blocks = 1; blocks <= 6; ++blocks)
    for (const SegmentStarts& starts : all_segments(blocks))
      for (int micro = 1; micro <= 3; ++micro)
        for (const auto order : {kBatchMajor, kLayerMajor})
          f(make_schedule(blocks, micro, starts, order), blocks, micro, order);
}

TEST(Schedule, OneMicroBatchGoesForthAndBack) {
  const std::vector<Action> expected{forward(kEmbedding), forward(0),  forward(1),  forward(2, Keeps::All),
                                     backward(kHead),     backward(2), backward(1), backward(0),
                                     backward(kEmbedding)};
  EXPECT_EQ(make_schedule(3, 1, {}, kBatchMajor), expected);
  EXPECT_EQ(make_schedule(3, 1, {0, 1, 2}, kBatchMajor), expected) << "a segment for every block is no segment at all";
}

TEST(Schedule, SegmentsRestoreTheirInputsAndTheLastOneHasThem) {
  const std::vector<Action> expected{forward(kEmbedding),
                                     forward(0),
                                     forward(1, Keeps::Nothing),
                                     forward(2, Keeps::Nothing),
                                     forward(3),
                                     forward(4),
                                     forward(5, Keeps::All),
                                     backward(kHead),
                                     backward(5),
                                     backward(4),
                                     backward(3),
                                     replay(0),
                                     replay(1),
                                     backward(2),
                                     backward(1),
                                     backward(0),
                                     backward(kEmbedding)};
  EXPECT_EQ(make_schedule(6, 1, {0, 3}, kBatchMajor), expected);
}

TEST(Schedule, UnevenSegments) {
  const std::vector<Action> expected{forward(kEmbedding), forward(0),  forward(1, Keeps::Nothing),
                                     forward(2),          forward(3),  forward(4, Keeps::All),
                                     backward(kHead),     backward(4), backward(3),
                                     backward(2),  // 2 is a segment of one block: nothing to restore
                                     replay(0),           backward(1), backward(0),
                                     backward(kEmbedding)};
  EXPECT_EQ(make_schedule(5, 1, {0, 2, 3}, kBatchMajor), expected);
}

TEST(Schedule, BatchMajorRunsOneMicroBatchAfterTheOther) {
  const auto one = make_schedule(4, 1, {0, 2}, kBatchMajor), three = make_schedule(4, 3, {0, 2}, kBatchMajor);
  ASSERT_EQ(three.size(), 3 * one.size());
  for (std::size_t t = 0; t < three.size(); ++t) {
    Action a = one[t % one.size()];
    a.micro_batch = static_cast<int>(t / one.size());
    EXPECT_EQ(three[t], a);
  }
}

TEST(Schedule, LayerMajorRunsAllMicroBatchesThroughAPartAndBackwardInReverse) {
  const std::vector<Action> expected{forward(kEmbedding),
                                     forward(kEmbedding, Keeps::Input, 1),
                                     forward(0),
                                     forward(0, Keeps::Input, 1),
                                     forward(1, Keeps::Input),
                                     forward(1, Keeps::All, 1),  // only this one's backward comes before any other
                                     backward(kHead, 1),
                                     backward(kHead),
                                     backward(1, 1),
                                     backward(1),
                                     backward(0, 1),
                                     backward(0),
                                     backward(kEmbedding, 1),
                                     backward(kEmbedding)};
  EXPECT_EQ(make_schedule(2, 2, {}, kLayerMajor), expected);
}

// Carried out on nothing but "is this input there?": every action finds what it needs, and nothing stays behind.
TEST(Schedule, EveryActionFindsItsInput) {
  for_all_schedules([](const std::vector<Action>& schedule, int blocks, int micro, AccumulationOrder) {
    std::map<std::pair<int, int>, bool> input;  // of (micro-batch, block)
    std::map<int, int> forward_done, backward_next;
    std::map<std::pair<int, int>, int> backwards;
    for (int m = 0; m < micro; ++m) forward_done[m] = kEmbedding - 1, backward_next[m] = kHead;
    for (const Action& a : schedule) {
      const int m = a.micro_batch;
      if (a.pass == Pass::Forward) {
        ASSERT_EQ(a.part, ++forward_done[m]);
        if (a.part >= 0) input[{m, a.part}] = a.keep_input;
      } else if (a.pass == Pass::Replay) {
        ASSERT_TRUE((input[{m, a.part}]));
        ASSERT_FALSE((input[{m, a.part + 1}])) << "a replay that restores nothing";
        input[{m, a.part + 1}] = true;
        EXPECT_TRUE(a.keep_input);
      } else {
        ASSERT_EQ(a.part, backward_next[m]);
        if (a.part == kHead) {
          ASSERT_EQ(forward_done[m], blocks - 1);
        }
        if (a.part >= 0) {
          ASSERT_TRUE(std::exchange(input[{m, a.part}], false));
        }
        backward_next[m] = a.part == kHead ? blocks - 1 : a.part - 1;
        ++backwards[{m, a.part}];
      }
    }
    for (const auto& [which, there] : input) EXPECT_FALSE(there);
    EXPECT_EQ(backwards.size(), static_cast<std::size_t>(micro * (blocks + 2)));
  });
}

TEST(Schedule, ActivationsAreKeptExactlyWhereNoOtherBackwardComesBefore) {
  for_all_schedules([](const std::vector<Action>& schedule, int, int, AccumulationOrder) {
    for (std::size_t t = 0; t < schedule.size(); ++t) {
      const Action& a = schedule[t];
      if (a.pass != Pass::Forward || a.part < 0) {
        EXPECT_FALSE(a.keep_activations);
        continue;
      }
      const auto next = std::find_if(schedule.begin() + static_cast<std::ptrdiff_t>(t), schedule.end(),
                                     [](const Action& b) { return b.pass == Pass::Backward && b.part >= 0; });
      EXPECT_EQ(a.keep_activations, next->part == a.part && next->micro_batch == a.micro_batch);
    }
  });
}

TEST(Schedule, SegmentsKeepFewInputsAndReplayEveryBlockAtMostOnce) {
  for (int segments = 1; segments <= 5; ++segments)
    for (int size = 1; size <= 5; ++size) {
      SegmentStarts starts;
      for (int s = 0; s < segments; ++s) starts.push_back(s * size);
      int alive = 0, most = 0, replays = 0;
      for (const Action& a : make_schedule(segments * size, 1, starts, kBatchMajor)) {
        if (a.part < 0) continue;
        if (a.pass == Pass::Forward) alive += a.keep_input;
        if (a.pass == Pass::Replay) ++alive, ++replays;
        most = std::max(most, alive);
        if (a.pass == Pass::Backward) --alive;
      }
      EXPECT_EQ(most, segments + size - 1);
      EXPECT_EQ(replays, (segments - 1) * (size - 1));
    }
}

TEST(Schedule, RefusesWhatIsNoSchedule) {
  EXPECT_THROW(make_schedule(0, 1, {}, kBatchMajor), LogicError);
  EXPECT_THROW(make_schedule(4, 0, {}, kBatchMajor), LogicError);
  for (const SegmentStarts& wrong : std::vector<SegmentStarts>{{1}, {0, 4}, {0, 2, 2}, {0, 3, 2}, {0, -1}})
    EXPECT_THROW(make_schedule(4, 1, wrong, kBatchMajor), LogicError);
}

// ---- reductions -----------------------------------------------------------------------------------------------------

// Blocks own units 1 .. L. Unit 0: the embedding's table; the head has its own unit as well, and the table if it is
// tied.
PartUnits units_of(int blocks, bool tied) {
  PartUnits units{.blocks = {}, .embedding = {0}, .head = {blocks + 1}};
  for (int b = 0; b < blocks; ++b) units.blocks.push_back({b + 1});
  if (tied) units.head.push_back(0);
  return units;
}

std::map<int, int> reductions(int blocks, int micro, bool tied, ReduceWhen when, AccumulationOrder order,
                              const SegmentStarts& starts = {}) {
  const auto schedule = make_schedule(blocks, micro, starts, order);
  std::map<int, int> counts;
  for (const auto& reduced : plan_reductions(schedule, units_of(blocks, tied), when, order))
    for (const int unit : reduced) ++counts[unit];
  return counts;
}

TEST(Reductions, OfABlockArePerMicroBatchOrPerStep) {
  for (int blocks = 1; blocks <= 6; ++blocks)
    for (int micro = 1; micro <= 3; ++micro)
      for (const SegmentStarts& starts : all_segments(blocks))
        for (int b = 1; b <= blocks; ++b) {
          EXPECT_EQ(reductions(blocks, micro, false, ReduceWhen::EachMicroBatch, kBatchMajor, starts)[b], micro);
          EXPECT_EQ(reductions(blocks, micro, false, ReduceWhen::Once, kBatchMajor, starts)[b], 1);
          EXPECT_EQ(reductions(blocks, micro, false, ReduceWhen::EachMicroBatch, kLayerMajor, starts)[b], 1);
          EXPECT_EQ(reductions(blocks, micro, false, ReduceWhen::Once, kLayerMajor, starts)[b], 1);
        }
}

TEST(Reductions, OfATiedTableCountBothOfItsParts) {
  for (int micro = 1; micro <= 3; ++micro) {
    EXPECT_EQ(reductions(4, micro, false, ReduceWhen::EachMicroBatch, kBatchMajor)[0], micro);
    EXPECT_EQ(reductions(4, micro, true, ReduceWhen::EachMicroBatch, kBatchMajor)[0], 2 * micro);
    EXPECT_EQ(reductions(4, micro, true, ReduceWhen::Once, kBatchMajor)[0], 1);
    EXPECT_EQ(reductions(4, micro, true, ReduceWhen::EachMicroBatch, kLayerMajor)[0],
              2);  // the head's, the embedding's
    EXPECT_EQ(reductions(4, micro, true, ReduceWhen::EachMicroBatch, kLayerMajor)[5], 1);
  }
}

TEST(Reductions, EveryBackwardIsReducedAndNothingIsReducedWithoutOne) {
  for (const bool tied : {false, true})
    for (const auto when : {ReduceWhen::EachMicroBatch, ReduceWhen::Once})
      for_all_schedules([&](const std::vector<Action>& schedule, int blocks, int, AccumulationOrder order) {
        const PartUnits units = units_of(blocks, tied);
        const auto plan = plan_reductions(schedule, units, when, order);
        ASSERT_EQ(plan.size(), schedule.size());
        std::map<int, int> waiting;  // contributions not reduced yet
        for (std::size_t t = 0; t < schedule.size(); ++t) {
          if (schedule[t].pass == Pass::Backward)
            for (const int unit : units.of(schedule[t].part)) ++waiting[unit];
          for (const int unit : plan[t]) {
            EXPECT_GT(waiting[unit], 0);
            waiting[unit] = 0;
          }
        }
        for (const auto& [unit, contributions] : waiting) EXPECT_EQ(contributions, 0) << "unit " << unit;
      });
}

TEST(Reductions, EachMicroBatchLeavesNothingForLater) {
  const auto schedule = make_schedule(3, 2, {}, kBatchMajor);
  const PartUnits units = units_of(3, true);
  const auto plan = plan_reductions(schedule, units, ReduceWhen::EachMicroBatch, kBatchMajor);
  for (std::size_t t = 0; t < schedule.size(); ++t)
    EXPECT_EQ(plan[t], schedule[t].pass == Pass::Backward ? units.of(schedule[t].part) : std::vector<int>());
}

}  // namespace
}  // namespace regather
