// Plans against an exhaustive search that follows a step from moment to moment, on problems drawn at random.
#include "ckpt/planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <random>

namespace regather {
namespace {

// The peak of a step, moment by moment: forwards, the head, backwards. What a block moves to the host is on the device
// beside the next block's forward and backward.
std::int64_t peak_of(const KeepProblem& p, const std::vector<int>& choices) {
  std::int64_t held = 0, peak = 0;
  const auto choice = [&](std::size_t b) { return p.blocks[b][static_cast<std::size_t>(choices[b])]; };
  const auto passing = [&](std::size_t b) { return b > 0 ? choice(b - 1).moved : 0; };
  for (std::size_t b = 0; b < p.blocks.size(); ++b) {
    peak = std::max(peak, held + passing(b) + choice(b).need);
    held += choice(b).kept;
  }
  peak = std::max(peak, held + p.head);
  for (std::size_t b = p.blocks.size(); b-- > 0;) {
    held -= choice(b).kept;
    peak = std::max(peak, held + passing(b) + choice(b).need);
  }
  return peak;
}

double seconds_of(const KeepProblem& p, const std::vector<int>& choices) {
  double seconds = 0;
  for (std::size_t b = 0; b < p.blocks.size(); ++b)
    seconds += p.blocks[b][static_cast<std::size_t>(choices[b])].seconds;
  return seconds;
}

void every_plan(const KeepProblem& p, const std::function<void(const std::vector<int>&)>& visit) {
  std::vector<int> choices(p.blocks.size(), 0);
  while (true) {
    visit(choices);
    std::size_t b = 0;
    while (b < choices.size() && ++choices[b] == static_cast<int>(p.blocks[b].size())) choices[b++] = 0;
    if (b == choices.size()) return;
  }
}

// moves: every block but the last has choices that move something. Small numbers (most) make many ties.
KeepProblem random_problem(std::mt19937& random, int blocks, int choices, bool moves = false, std::int64_t most = 100) {
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  KeepProblem p;
  for (int b = 0; b < blocks; ++b) {
    auto& of_block = p.blocks.emplace_back();
    for (int c = 0; c < choices; ++c) {
      const std::int64_t kept = draw(1, most) * 1000, moved = moves && b + 1 < blocks ? draw(0, most) * 1000 : 0;
      of_block.push_back(
          {kept, kept + moved + draw(0, 2 * most) * 1000, static_cast<double>(draw(0, 10 * most)) / 64, moved});
    }
  }
  p.head = draw(0, 3 * most) * 1000;
  return p;
}

TEST(Planner, IsAsFastAsTheFastestOfAllPlansWithinAnyMemory) {
  std::mt19937 random(1);
  for (int round = 0; round < 80; ++round) {
    const KeepProblem p = random_problem(random, 1 + round % 6, 2 + round % 4, round % 3 > 0, round % 2 ? 3 : 100);
    const KeepFrontier frontier(p);
    std::int64_t least = std::numeric_limits<std::int64_t>::max(), most = 0;
    every_plan(p, [&](const std::vector<int>& plan) {
      least = std::min(least, peak_of(p, plan));
      most = std::max(most, peak_of(p, plan));
    });
    EXPECT_EQ(frontier.points().front().bytes, least);
    EXPECT_FALSE(frontier.within(least - 1));
    for (int i = 0; i <= 8; ++i) {
      const std::int64_t limit = least + (most - least) * i / 8;
      double fastest = std::numeric_limits<double>::infinity();
      every_plan(p, [&](const std::vector<int>& plan) {
        if (peak_of(p, plan) <= limit) fastest = std::min(fastest, seconds_of(p, plan));
      });
      const auto point = frontier.within(limit);
      ASSERT_TRUE(point);
      EXPECT_DOUBLE_EQ(frontier.points()[*point].seconds, fastest);
    }
  }
}

TEST(Planner, PointsAreThePeakAndTheTimeOfTheirPlans) {
  std::mt19937 random(2);
  for (const bool moves : {false, true}) {
    const KeepProblem p = random_problem(random, 12, 9, moves);
    for (const std::size_t states : {std::size_t{32}, KeepFrontier::kStates}) {
      const KeepFrontier frontier(p, states);
      for (std::size_t i = 0; i < frontier.points().size(); ++i) {
        EXPECT_EQ(peak_of(p, frontier.choices(i)), frontier.points()[i].bytes);
        EXPECT_DOUBLE_EQ(seconds_of(p, frontier.choices(i)), frontier.points()[i].seconds);
        if (i == 0) continue;
        EXPECT_GT(frontier.points()[i].bytes, frontier.points()[i - 1].bytes);
        EXPECT_LT(frontier.points()[i].seconds, frontier.points()[i - 1].seconds);
      }
    }
  }
}

TEST(Planner, ThinnedFrontiersStayWithinAPercentOfTheExactOne) {
  std::mt19937 random(3);
  for (int round = 0; round < 10; ++round) {
    const KeepProblem p = random_problem(random, 6, 6, round % 2 > 0);
    const KeepFrontier exact(p, 1U << 20U), thin(p, round % 2 > 0 ? 512 : 128);
    const std::int64_t least = exact.points().front().bytes, most = exact.points().back().bytes;
    EXPECT_EQ(thin.points().front().bytes, least);
    for (int i = 0; i <= 20; ++i) {
      const std::int64_t limit = least + (most - least) * i / 20;
      EXPECT_LE(thin.points()[thin.within(limit).value()].seconds,
                1.01 * exact.points()[exact.within(limit).value()].seconds);
    }
  }
}

// Running a block again needs more than it keeps, beside what earlier blocks keep: least where little is held.
TEST(Planner, WhatABackwardNeedsIsBesideWhatEarlierBlocksKeep) {
  const std::vector<KeepChoice> block = {{10, 50, 1.0}, {30, 30, 0.0}};
  const KeepFrontier frontier({{block, block, block}, 0});
  const auto within = [&](std::int64_t bytes) { return frontier.choices(frontier.within(bytes).value()); };
  EXPECT_FALSE(frontier.within(59));
  EXPECT_EQ(within(60), (std::vector<int>{0, 0, 1}));  // the last block run again: 10 + 10 + 50
  EXPECT_EQ(within(70), (std::vector<int>{0, 1, 1}));
  EXPECT_EQ(within(89), (std::vector<int>{0, 1, 1}));
  EXPECT_EQ(within(90), (std::vector<int>{1, 1, 1}));
}

// Moved bytes are beside the next block only: the second block sees them, the head does not.
TEST(Planner, WhatIsMovedToTheHostIsBesideTheNextBlockAlone) {
  const std::vector<KeepChoice> first = {{30, 30, 0.0}, {10, 30, 0.5, 20}}, others = {{10, 10, 0.0}};
  const KeepFrontier frontier({{first, others, others}, 40});
  const auto within = [&](std::int64_t bytes) { return frontier.choices(frontier.within(bytes).value())[0]; };
  EXPECT_FALSE(frontier.within(69));
  EXPECT_EQ(within(70), 1);  // 10 + 10 + 10 and the head
  EXPECT_EQ(within(89), 1);
  EXPECT_EQ(within(90), 0);
  const std::vector<KeepChoice> wide = {{10, 60, 0.0}};
  EXPECT_EQ(KeepFrontier({{first, wide, others}, 40}).points().front().bytes, 90);  // 10 + 20 + 60: as without moving
}

TEST(Planner, TheHeadIsBesideWhatAllBlocksKeep) {
  const std::vector<KeepChoice> block = {{10, 10, 1.0}, {30, 30, 0.0}};
  const KeepFrontier frontier({{block, block}, 100});
  EXPECT_EQ(frontier.points().front().bytes, 120);
  EXPECT_EQ(frontier.points().back().bytes, 160);
}

TEST(Planner, OneMoreSlotIsTakenWhenItsGathersCostMoreThanWhatItsBytesWouldSave) {
  const std::vector<KeepChoice> block = {{10, 10, 1.0}, {30, 30, 0.0}};
  const KeepFrontier frontier({{block, block}, 0});  // 20: 2 s, 40: 1 s, 60: 0 s
  const auto plan = [&](double gathers, std::int64_t limit) {
    return plan_slots(frontier, {20, {2 * gathers, gathers, 0}}, limit);
  };
  EXPECT_FALSE(plan(1, 39));
  EXPECT_EQ(plan(0.5, 60)->slots, 1);  // 20 bytes save 1 s in a block, 0.5 s of gathers
  EXPECT_EQ(plan(2, 60)->slots, 2);
  EXPECT_EQ(plan(2, 60)->bytes, 60);
  EXPECT_EQ(plan(2, 80)->slots, 3);
  EXPECT_EQ(plan(0, 1000)->slots, 1);  // nothing to gain
  EXPECT_DOUBLE_EQ(plan(2, 1000)->seconds, 0);
  EXPECT_EQ(plan(2, 1000)->slots, 3);
}

// However many there are, so that a hundred blocks of forty choices are planned in a fraction of a second.
TEST(Planner, AFrontierOfManyBlocksHasABoundedNumberOfPoints) {
  std::mt19937 random(4);
  const KeepFrontier frontier(random_problem(random, 100, 40));
  EXPECT_GT(frontier.points().size(), 100U);
  EXPECT_LE(frontier.points().size(), KeepFrontier::kStates + 2);
}

}  // namespace
}  // namespace regather
