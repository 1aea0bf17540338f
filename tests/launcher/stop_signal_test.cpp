#include "launcher/stop_signal.h"

#include <gtest/gtest.h>

namespace regather::testing {
namespace {

TEST(StopSignal, IsHeardWhicheverOfTheThreeItIsAndSaidOnce) {
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) {
    const StopSignal stop;
    EXPECT_FALSE(stop.received());
    ::testing::internal::CaptureStderr();
    std::raise(signal);
    if (signal != SIGINT) std::raise(signal);
    EXPECT_EQ(::testing::internal::GetCapturedStderr(), "regather: stopping after this step\n");
    EXPECT_TRUE(stop.received());
  }
}

TEST(StopSignalDeathTest, ASecondInterruptEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const StopSignal stop;
        std::raise(SIGINT);
        std::raise(SIGINT);
      },
      ::testing::KilledBySignal(SIGINT), "stopping after this step");
}

}  // namespace
}  // namespace regather::testing
