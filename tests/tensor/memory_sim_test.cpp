// Allocators of many threads.
#include "tensor/memory.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

namespace regather {
namespace {

constexpr std::size_t kBytes = std::size_t{100} << 10;

TEST(Allocator, SixtyFourRanksHaveOneEachInOneProcess) {
  std::vector<std::jthread> ranks;
  std::vector<std::unique_ptr<Allocator>> allocators;
  for (int rank = 0; rank < 64; ++rank) {
    allocators.push_back(std::make_unique<Allocator>());
    ranks.emplace_back([&memory = *allocators.back(), rank] {
      const Buffer buffer(memory, kBytes, Tag::Workspace);
      std::memset(buffer.data(), rank, kBytes);
      EXPECT_EQ(buffer.data<unsigned char>()[5000], rank);
    });
  }
  ranks.clear();
  for (const auto& memory : allocators) EXPECT_EQ(memory->live_total(), 0);
}

}  // namespace
}  // namespace regather
