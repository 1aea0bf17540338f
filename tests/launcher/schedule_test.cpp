#include "launcher/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

namespace regather {
namespace {

constexpr LearningRate kTen{.peak = 1e-3, .min = 0, .warmup_steps = 10, .steps = 40};

TEST(LearningRate, WarmsUpAndFollowsHalfACosine) {
  const std::pair<int, double> table[] = {{1, 1e-4}, {5, 5e-4}, {10, 1e-3}, {25, 5e-4}, {40, 0}};
  for (const auto& [step, lr] : table) EXPECT_NEAR(kTen.at(step), lr, 1e-15) << step;
  EXPECT_NEAR(kTen.at(11), 9.9726e-4, 5e-9);  // 1e-3 (1 + cos(pi / 30)) / 2
  EXPECT_NEAR(kTen.at(11), 1e-3 * 0.5 * (1 + std::cos(std::acos(-1.0) / 30)), 1e-15);
}

TEST(LearningRate, TheFirstStepOfAWarmUpIsNotZeroAndTheLastIsThePeakExactly) {
  EXPECT_EQ(kTen.at(10), 1e-3);
  EXPECT_GT(kTen.at(1), 0);
  for (int step = 2; step <= 10; ++step) EXPECT_GT(kTen.at(step), kTen.at(step - 1));
  for (int step = 11; step <= 40; ++step) EXPECT_LT(kTen.at(step), kTen.at(step - 1));
}

TEST(LearningRate, TheCosineEndsAtTheLowestRateAndStaysThere) {
  const LearningRate lr{.peak = 3e-4, .min = 3e-5, .warmup_steps = 0, .steps = 100};
  EXPECT_NEAR(lr.at(50), (3e-4 + 3e-5) / 2, 1e-18);
  EXPECT_EQ(lr.at(100), 3e-5);
  EXPECT_EQ(lr.at(1000), 3e-5);
}

TEST(LearningRate, WithoutAWarmUpTheFirstStepIsBelowThePeak) {
  const LearningRate lr{.peak = 1e-3, .min = 0, .warmup_steps = 0, .steps = 10};
  EXPECT_NEAR(lr.at(1), 1e-3 * 0.5 * (1 + std::cos(std::acos(-1.0) / 10)), 1e-15);
  EXPECT_EQ((LearningRate{.peak = 1e-3, .min = 1e-4, .warmup_steps = 0, .steps = 1}.at(1)), 1e-4);
}

TEST(LearningRate, AWarmUpMayBeLongerThanTheRun) {
  const LearningRate lr{.peak = 1e-3, .min = 0, .warmup_steps = 100, .steps = 10};
  for (int step = 1; step <= 10; ++step) EXPECT_NEAR(lr.at(step), 1e-5 * step, 1e-18);
}

TEST(LearningRate, AConstantRateWarmsUpToo) {
  const LearningRate lr{.shape = LearningRate::Shape::Constant, .peak = 1e-3, .min = 0, .warmup_steps = 4, .steps = 10};
  EXPECT_EQ(lr.at(2), 5e-4);
  for (const int step : {4, 5, 10, 11}) EXPECT_EQ(lr.at(step), 1e-3);
}

}  // namespace
}  // namespace regather
