#include "launcher/cost_model.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tensor/error.h"
#include "tests/launcher/temporary_folder.h"

namespace regather {
namespace {

using Activity = Recorder::Activity;

Recorder::Interval interval(Activity activity, std::string name, Work work, double microseconds = 0) {
  Recorder::Interval i;
  i.activity = activity;
  i.name = std::move(name);
  i.work = work;
  i.own = i.length = std::chrono::nanoseconds(static_cast<std::int64_t>(1000 * microseconds));
  return i;
}

constexpr MachineLimits kLimits{1e9, 1e9};

CostModel learned() {
  CostModel costs(kLimits);
  const Work work{4e6, 1e5};
  std::vector<std::vector<Recorder::Interval>> steps;
  for (const double us : {100.0, 900.0, 110.0})  // the median step counts
    steps.push_back({interval(Activity::Scope, "step", {}, 30), interval(Activity::Forward, "linear", work, us),
                     interval(Activity::Recompute, "linear", work, us + 10),
                     interval(Activity::Backward, "linear", {8e6, 2e5}, 2 * us),
                     interval(Activity::Communicate, "all_gather of block (forward)", {}, 4),
                     interval(Activity::Wait, "all_gather of block (forward)", {}, 6)});
  std::vector<CostModel::Step> all;
  for (const auto& s : steps) all.push_back({s, 1000});
  costs.learn(all);
  return costs;
}

TEST(CostModel, AnOperationCostsWhatItTookWhetherItRunsFirstOrAgain) {
  const CostModel costs = learned();
  EXPECT_NEAR(costs.seconds(interval(Activity::Forward, "linear", {4e6, 1e5})), 115e-6, 1e-12);
  EXPECT_NEAR(costs.seconds(interval(Activity::Recompute, "linear", {4e6, 1e5})), 115e-6, 1e-12);
  EXPECT_NEAR(costs.seconds(interval(Activity::Backward, "linear", {8e6, 2e5})), 220e-6, 1e-12);
}

TEST(CostModel, OtherWorkIsAsFarFromItsLeastTimeAsTheNearestThatWasMeasured) {
  const CostModel costs = learned();
  EXPECT_NEAR(costs.seconds(interval(Activity::Forward, "linear", {8e6, 1e5})), 230e-6, 1e-12);
}

TEST(CostModel, WhatWasNeverMeasuredFollowsFromTheLimits) {
  const CostModel costs = learned();
  EXPECT_NEAR(costs.seconds(interval(Activity::Forward, "gelu", {1e3, 1e6})), CostModel::kFromLimits * 1e-3, 1e-12);
  EXPECT_FALSE(CostModel(kLimits).measured());
  EXPECT_TRUE(costs.measured());
}

TEST(CostModel, CommunicationIsByTheByteAndTheRestByTheOperation) {
  const CostModel costs = learned();
  EXPECT_NEAR(costs.communication_seconds(2000), 20e-6, 1e-12);
  EXPECT_NEAR(costs.overhead_seconds(6), 60e-6, 1e-12);
  EXPECT_EQ(costs.seconds(interval(Activity::Wait, "linear", {4e6, 1e5})), 0);
}

TEST(CostModel, TextsGiveTheSamePrices) {
  const CostModel costs = learned(), again = CostModel::from_json(costs.to_json({"m", 1, 2}));
  EXPECT_EQ(costs.to_json({"m", 1, 2}), again.to_json({"m", 1, 2}));
  EXPECT_THROW(CostModel::from_json("{}"), Error);
  EXPECT_THROW(CostModel::from_json("not json"), Error);
}

TEST(CostModel, TheMeanOfRanksIsInTheMiddle) {
  CostModel fast(kLimits), slow(kLimits);
  const std::vector<Recorder::Interval> a{interval(Activity::Forward, "add", {0, 100}, 10)},
      b{interval(Activity::Forward, "add", {0, 100}, 30)};
  fast.learn({{a, 0}});
  slow.learn({{b, 0}});
  EXPECT_NEAR(CostModel::mean({fast, slow}).seconds(a[0]), 20e-6, 1e-12);
}

class CostFile : public ::testing::Test {
 protected:
  void SetUp() override { setenv("XDG_CACHE_HOME", folder_.path().c_str(), 1); }
  void TearDown() override { unsetenv("XDG_CACHE_HOME"); }
  const testing::TemporaryFolder folder_;
};

TEST_F(CostFile, IsOneForEachMachineThreadsAndRanks) {
  const CostPlace place{"m", 1, 2};
  EXPECT_FALSE(load_costs(place));
  save_costs(place, learned());
  ASSERT_TRUE(load_costs(place));
  EXPECT_EQ(load_costs(place)->to_json(place), learned().to_json(place));
  EXPECT_FALSE(load_costs({"m", 2, 2}));
  EXPECT_FALSE(load_costs({"m", 1, 1}));
  EXPECT_FALSE(load_costs({"n", 1, 2}));
}

TEST_F(CostFile, ThatCannotBeReadIsNamed) {
  const CostPlace place{"m", 1, 2};
  save_costs(place, learned());
  std::ofstream(cost_file(place)) << "{";
  try {
    load_costs(place);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()).find(cost_file(place).string()), 0U) << e.what();
  }
}

}  // namespace
}  // namespace regather
