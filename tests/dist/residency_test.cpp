#include "dist/residency.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "tensor/error.h"
#include "tests/dist/optimal_gathers.h"

namespace regather {
namespace {

using Uses = std::vector<int>;

int gathers(const std::vector<Access>& plan) { return static_cast<int>(std::ranges::count_if(plan, &Access::gathers)); }

// Carries a plan out; what it may not do fails. Returns the most blocks that were resident.
int carry_out(const Uses& uses, const std::vector<Access>& plan) {
  std::set<int> resident;
  std::size_t most = 0;
  EXPECT_EQ(plan.size(), uses.size());
  for (std::size_t t = 0; t < uses.size(); ++t) {
    if (uses[t] == kNoBlock) {
      EXPECT_EQ(plan[t], Access{}) << t;
      continue;
    }
    EXPECT_EQ(plan[t].gathers, !resident.contains(uses[t])) << t;
    if (plan[t].evict != kNoBlock) {
      EXPECT_TRUE(plan[t].gathers) << t;
      EXPECT_EQ(resident.erase(plan[t].evict), 1U) << t << ": evicts what is not there";
    }
    resident.insert(uses[t]);
    most = std::max(most, resident.size());
  }
  return static_cast<int>(most);
}

TEST(Residency, NoChoiceOfEvictionsNeedsFewerGathers) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 400; ++trial) {
    const auto blocks = static_cast<unsigned>(1 + random() % 6);
    Uses uses(5 + random() % 20);
    for (int& use : uses) use = random() % 8 == 0 ? kNoBlock : static_cast<int>(random() % blocks);
    for (int slots = 1; slots <= static_cast<int>(blocks) + 1; ++slots) {
      const auto plan = plan_residency(uses, static_cast<int>(blocks), slots);
      EXPECT_LE(carry_out(uses, plan), slots);
      EXPECT_EQ(gathers(plan), optimal_gathers(uses, slots));
    }
  }
}

TEST(Residency, ForwardAndBackwardKeepTheLastBlocks) {  // 0 1 2 3 | 3 2 1 0, two slots
  const Uses uses{0, 1, 2, 3, 3, 2, 1, 0};
  const std::vector<Access> expected{{true, kNoBlock},  {true, kNoBlock},  {true, 0}, {true, 1},
                                     {false, kNoBlock}, {false, kNoBlock}, {true, 3}, {true, 3}};
  auto plan = plan_residency(uses, 4, 2);
  EXPECT_EQ(gathers(plan), 2 * 4 - 2);
  plan[6].evict = plan[7].evict = 3;  // any block will do: none of them is used again
  EXPECT_EQ(plan, expected);
}

TEST(Residency, WithASlotForEveryBlockNothingIsEvicted) {
  const Uses uses{0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0};
  for (const int slots : {3, 4, 100}) {
    const auto plan = plan_residency(uses, 3, slots);
    EXPECT_EQ(gathers(plan), 3);
    EXPECT_TRUE(std::ranges::all_of(plan, [](const Access& a) { return a.evict == kNoBlock; }));
  }
}

TEST(Residency, ActionsWithoutABlockTakeNoSlot) {
  const Uses with{kNoBlock, 0, 1, kNoBlock, 1, kNoBlock, 0, kNoBlock}, without{0, 1, 1, 0};
  for (const int slots : {1, 2})
    EXPECT_EQ(gathers(plan_residency(with, 2, slots)), gathers(plan_residency(without, 2, slots)));
  EXPECT_TRUE(plan_residency({}, 2, 1).empty());
}

TEST(Residency, ThePlanIsTheSameEveryTime) {
  const Uses uses{0, 1, 2, 3, 4, 0, 1, 2};
  EXPECT_EQ(plan_residency(uses, 5, 3), plan_residency(uses, 5, 3));
}

TEST(Residency, WithoutASlotNothingCanRun) {
  const Uses uses{0};
  EXPECT_THROW(plan_residency(uses, 1, 0), LogicError);
  EXPECT_THROW(plan_residency(uses, 1, -1), LogicError);
}

}  // namespace
}  // namespace regather
