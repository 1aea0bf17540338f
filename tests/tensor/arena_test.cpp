#include "tensor/arena.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace regather {
namespace {

TEST(Arena, FreedNeighboursAreMergedWhateverTheOrder) {
  const std::vector<std::vector<int>> orders = {{0, 1, 2}, {2, 1, 0}, {0, 2, 1}, {1, 0, 2}};
  for (const auto& order : orders) {
    Arena arena;
    void* parts[3];
    for (void*& part : parts) part = arena.allocate(4 << 20);
    void* const end = arena.allocate(4 << 20);
    const std::size_t taken = arena.system_bytes();
    for (const int i : order) arena.release(parts[static_cast<std::size_t>(i)], 4 << 20);
    void* const whole = arena.allocate(12 << 20);
    EXPECT_EQ(whole, parts[0]);
    EXPECT_EQ(arena.system_bytes(), taken);
    arena.release(whole, 12 << 20);
    arena.release(end, 4 << 20);
  }
}

TEST(Arena, TakesTheSmallestHoleThatFits) {
  Arena arena;
  void* const large = arena.allocate(8 << 20);
  void* const wall = arena.allocate(1 << 20);
  void* const small = arena.allocate(3 << 20);
  void* const wall2 = arena.allocate(1 << 20);
  arena.release(large, 8 << 20);
  arena.release(small, 3 << 20);
  void* const between = arena.allocate(5 << 19);  // 2.5 MiB
  EXPECT_EQ(between, small);
  arena.release(between, 5 << 19);
  arena.release(wall, 1 << 20);
  arena.release(wall2, 1 << 20);
}

TEST(Arena, GrowsByWhatIsMissingAtTheTop) {
  Arena arena;
  void* const a = arena.allocate(8 << 20);
  arena.release(a, 8 << 20);
  const std::size_t before = arena.system_bytes();
  void* const b = arena.allocate(12 << 20);
  EXPECT_EQ(b, a);
  EXPECT_LE(arena.system_bytes() - before, (std::size_t{4} << 20) + Arena::kHugePage);
  arena.release(b, 12 << 20);
}

TEST(Arena, SaysWhenTheRangeIsUsedUpAndRecovers) {
  Arena arena(std::size_t{64} << 20);
  std::vector<void*> parts;
  while (void* part = arena.allocate(5 << 20)) parts.push_back(part);
  EXPECT_GE(parts.size(), 11U);
  EXPECT_LE(parts.size(), 12U);
  EXPECT_LE(arena.system_bytes(), std::size_t{64} << 20);
  EXPECT_EQ(arena.allocate(65 << 20), nullptr);
  for (void* part : parts) arena.release(part, 5 << 20);
  void* const again = arena.allocate(60 << 20);
  EXPECT_NE(again, nullptr);
  arena.release(again, 60 << 20);
}

TEST(Arena, SmallRequestsOverflowIntoTheRoomOfLargeOnes) {
  Arena arena(std::size_t{16} << 20);  // 2 MiB of it for small ones
  std::vector<void*> parts;
  for (int i = 0; i < 200; ++i) {
    parts.push_back(arena.allocate(30000));
    ASSERT_NE(parts.back(), nullptr) << i;
    std::memset(parts.back(), 1, 30000);
  }
  for (void* part : parts) arena.release(part, 30000);
}

}  // namespace
}  // namespace regather
