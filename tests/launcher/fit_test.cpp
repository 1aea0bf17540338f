#include "launcher/fit.h"

#include <gtest/gtest.h>

namespace regather {
namespace {

TEST(Fit, FindsTheLargestThatFits) {
  for (const std::int64_t largest : {0, 1, 2, 3, 7, 8, 9, 1000, 4095, 4096})
    EXPECT_EQ(largest_that_fits(4096, [&](std::int64_t n) { return n <= largest; }), largest);
  EXPECT_EQ(largest_that_fits(100, [](std::int64_t) { return true; }), 100);
  EXPECT_EQ(largest_that_fits(1, [](std::int64_t) { return true; }), 1);
}

TEST(Fit, AsksLittle) {
  int asked = 0;
  largest_that_fits(1 << 24, [&](std::int64_t n) {
    ++asked;
    return n <= 777777;
  });
  EXPECT_LE(asked, 42);
}

}  // namespace
}  // namespace regather
