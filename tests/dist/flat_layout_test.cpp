#include "dist/flat_layout.h"

#include <gtest/gtest.h>

#include <numeric>

#include "tensor/error.h"

namespace regather {
namespace {

using Sizes = std::vector<std::int64_t>;

const std::vector<Sizes> kTables{
    {}, {0}, {1}, {7}, {0, 3, 0}, {1, 1, 1}, {5, 1, 9, 257}, {257 * 33, 33, 1, 2, 1000}, {4, 4, 4, 4}};

TEST(FlatLayout, ParametersFollowEachOtherWithoutGaps) {
  for (const Sizes& sizes : kTables) {
    const FlatLayout layout(sizes, 3);
    std::int64_t next = 0;
    for (std::size_t p = 0; p < sizes.size(); ++p) {
      EXPECT_EQ(layout.offset(p), next);
      EXPECT_EQ(layout.size(p), sizes[p]);
      next += sizes[p];
    }
    EXPECT_EQ(layout.total(), next);
  }
}

TEST(FlatLayout, ShardsAreEqualAndPaddedByLessThanOneElementARank) {
  for (const Sizes& sizes : kTables)
    for (int world = 1; world <= 8; ++world) {
      const FlatLayout layout(sizes, world);
      const std::int64_t total = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
      EXPECT_EQ(layout.padded(), layout.shard() * world);
      EXPECT_GE(layout.padded(), total);
      EXPECT_LT(layout.padded() - total, world);
    }
}

// Every element of every parameter on exactly one rank, where the flat buffer says it is, whatever the sizes.
TEST(FlatLayout, PiecesCoverEveryElementOnce) {
  for (const Sizes& sizes : kTables)
    for (int world = 1; world <= 8; ++world) {
      const FlatLayout layout(sizes, world);
      std::vector<std::vector<int>> covered;
      for (const std::int64_t n : sizes) covered.emplace_back(static_cast<std::size_t>(n), 0);
      for (int rank = 0; rank < world; ++rank) {
        std::int64_t end = 0;
        for (const FlatLayout::Piece& piece : layout.pieces(rank)) {
          EXPECT_GT(piece.size, 0);
          EXPECT_GE(piece.offset, end) << "pieces of a rank are in order and do not overlap";
          end = piece.offset + piece.size;
          EXPECT_LE(end, layout.shard());
          EXPECT_EQ(layout.shard() * rank + piece.offset, layout.offset(piece.param) + piece.first);
          for (std::int64_t i = 0; i < piece.size; ++i)
            ++covered.at(piece.param).at(static_cast<std::size_t>(piece.first + i));
        }
      }
      for (const auto& elements : covered)
        for (const int times : elements) EXPECT_EQ(times, 1);
    }
}

TEST(FlatLayout, MoreRanksThanElementsLeaveEmptyShards) {
  const FlatLayout layout(Sizes{2, 1}, 8);
  EXPECT_EQ(layout.shard(), 1);
  for (int rank = 0; rank < 8; ++rank) EXPECT_EQ(layout.pieces(rank).size(), rank < 3 ? 1U : 0U);
  EXPECT_EQ(FlatLayout(Sizes{}, 8).shard(), 0);
  EXPECT_TRUE(FlatLayout(Sizes{}, 8).pieces(0).empty());
}

TEST(FlatLayout, AShardBoundaryMayCutAParameter) {
  const FlatLayout layout(Sizes{3, 5}, 3);  // a a a | b b b | b b -
  ASSERT_EQ(layout.pieces(2).size(), 1U);
  EXPECT_EQ(layout.pieces(2)[0].param, 1U);
  EXPECT_EQ(layout.pieces(2)[0].first, 3);
  EXPECT_EQ(layout.pieces(2)[0].offset, 0);
  EXPECT_EQ(layout.pieces(2)[0].size, 2);
  const FlatLayout middle(Sizes{4, 4}, 3);  // a a a | a b b | b b -
  ASSERT_EQ(middle.pieces(1).size(), 2U);
  EXPECT_EQ(middle.pieces(1)[0].first, 3);
  EXPECT_EQ(middle.pieces(1)[1].offset, 1);
}

TEST(FlatLayout, SizesBeyondThirtyTwoBits) {
  const std::int64_t big = std::int64_t{1} << 40;
  const FlatLayout layout(Sizes{big, big + 1}, 7);
  EXPECT_EQ(layout.total(), 2 * big + 1);
  std::int64_t covered = 0;
  for (int rank = 0; rank < 7; ++rank)
    for (const FlatLayout::Piece& piece : layout.pieces(rank)) covered += piece.size;
  EXPECT_EQ(covered, layout.total());
}

TEST(FlatLayout, RefusesWhatIsNoLayout) {
  EXPECT_THROW(FlatLayout(Sizes{1}, 0), LogicError);
  EXPECT_THROW(FlatLayout(Sizes{1, -1}, 2), LogicError);
}

}  // namespace
}  // namespace regather
