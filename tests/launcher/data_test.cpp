#include "launcher/data.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "tests/launcher/temporary_folder.h"

namespace regather {
namespace {

namespace fs = std::filesystem;

class DataTest : public ::testing::Test {
 protected:
  fs::path file(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return folder_ / name;
  }
  // Bytes 0, 1, 2, ...; windows of T = 4 begin at 0, 4, 8, ..., so that a batch's first token tells its window.
  fs::path counting(std::int64_t windows) {
    std::string text;
    for (std::int64_t i = 0; i < windows * 4 + 1; ++i) text += static_cast<char>(i);
    return file("counting", text);
  }
  std::string refusal(DataOptions options) {
    try {
      Dataset data(std::move(options));
    } catch (const UsageError& e) {
      return e.what();
    }
    return "accepted";
  }

  const testing::TemporaryFolder own_;
  const fs::path folder_ = own_.path();
  CpuDevice device_;
};

// The windows that a rank trains on in a step, micro-batch after micro-batch.
std::vector<std::int64_t> windows_of(Dataset& data, Device& device, const BatchGrid& grid, std::int64_t rank,
                                     std::int64_t step) {
  std::vector<std::int64_t> ids;
  for (std::int64_t m = 0; m < grid.accumulation; ++m) {
    const Batch batch = data.batch(device, grid, rank, step, m);
    EXPECT_EQ(batch.first_sequence, (m * grid.ranks + rank) * grid.micro_batch);
    for (std::int64_t b = 0; b < grid.micro_batch; ++b) ids.push_back(batch.tokens.data<std::int32_t>()[b * 4] / 4);
  }
  return ids;
}

TEST_F(DataTest, TargetsAreTheNextTokensAndEveryTokenIsATargetOnce) {
  Dataset data({.files = {counting(10)}, .sequence = 4, .seed = 1});
  EXPECT_EQ(data.num_tokens(), 41);
  EXPECT_EQ(data.num_windows(), 10);
  const BatchGrid grid{.ranks = 1, .micro_batch = 10};
  const Batch batch = data.batch(device_, grid, 0, 0, 0);
  EXPECT_EQ(batch.tokens.shape(), (Shape{10, 4}));
  EXPECT_EQ(batch.targets.shape(), (Shape{10, 4}));
  EXPECT_EQ(device_.memory.live(Tag::Workspace), 2 * 10 * 4 * 4);
  std::set<std::int32_t> targets;
  for (std::int64_t i = 0; i < 40; ++i) {
    EXPECT_EQ(batch.targets.data<std::int32_t>()[i], batch.tokens.data<std::int32_t>()[i] + 1);
    targets.insert(batch.targets.data<std::int32_t>()[i]);
  }
  EXPECT_EQ(targets.size(), 40U);
}

TEST_F(DataTest, BytesAboveAsciiAreNotNegative) {
  Dataset data({.files = {file("high", std::string(5, static_cast<char>(0xFF)))}, .sequence = 4});
  const Batch batch = data.batch(device_, {}, 0, 0, 0);
  EXPECT_EQ(batch.tokens.data<std::int32_t>()[0], 255);
  EXPECT_EQ(Dataset::vocab(), 256);
}

TEST_F(DataTest, FilesAreReadAsIfTheyWereOneInTheOrderGiven) {
  const fs::path a = file("a", "abc"), b = file("b", "d"), c = file("c", "efghi");
  Dataset data({.files = {c, a, b, c}, .sequence = 4});
  ASSERT_EQ(data.num_tokens(), 14);
  std::vector<std::int32_t> all(14);
  data.read(0, all);
  EXPECT_EQ(std::string(all.begin(), all.end()), "efghiabcdefghi");
  for (std::int64_t first = 0; first < 14; ++first) {
    for (std::int64_t n = 0; first + n <= 14; ++n) {
      std::vector<std::int32_t> part(static_cast<std::size_t>(n));
      data.read(first, part);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + first)) << first << " + " << n;
    }
  }
  EXPECT_THROW(data.read(14, {all.data(), 1}), LogicError);
}

TEST_F(DataTest, RanksAreDisjointAndTheirUnionIsTheOneRankOrder) {
  const fs::path path = counting(48);
  for (const std::int64_t global : {12, 24, 36}) {
    Dataset one({.files = {path}, .sequence = 4, .seed = 5});
    for (std::int64_t ranks : {1, 2, 3}) {
      for (std::int64_t accumulation : {1, 2}) {
        const BatchGrid grid{ranks, global / ranks / accumulation, accumulation};
        ASSERT_EQ(grid.sequences_per_step(), global);
        for (std::int64_t step = 0; step < 2 * 48 / global + 3; ++step) {
          std::map<std::int64_t, std::int64_t> by_place;  // place in the step -> window
          for (std::int64_t rank = 0; rank < ranks; ++rank) {
            Dataset data({.files = {path}, .sequence = 4, .seed = 5});
            const std::vector<std::int64_t> ids = windows_of(data, device_, grid, rank, step);
            for (std::size_t i = 0; i < ids.size(); ++i) {
              const auto b = static_cast<std::int64_t>(i) % grid.micro_batch,
                         m = static_cast<std::int64_t>(i) / grid.micro_batch;
              by_place[grid.first_sequence(rank, m) + b] = ids[i];
            }
          }
          ASSERT_EQ(static_cast<std::int64_t>(by_place.size()), global) << "two ranks have the same place";
          for (const auto& [place, window] : by_place) EXPECT_EQ(window, one.window(step * global + place));
        }
      }
    }
  }
}

TEST_F(DataTest, EveryEpochIsAnotherOrderOfAllWindowsAndBatchesRunOverItsEnd) {
  Dataset data({.files = {counting(10)}, .sequence = 4, .seed = 1});
  const BatchGrid grid{.ranks = 1, .micro_batch = 4};
  std::vector<std::int64_t> ids;
  for (std::int64_t step = 0; step < 10; ++step)
    for (std::int64_t id : windows_of(data, device_, grid, 0, step)) ids.push_back(id);
  ASSERT_EQ(ids.size(), 40U);
  std::set<std::vector<std::int64_t>> orders;
  for (int epoch = 0; epoch < 4; ++epoch) {
    std::vector<std::int64_t> order(ids.begin() + 10 * epoch, ids.begin() + 10 * epoch + 10);
    orders.insert(order);
    std::sort(order.begin(), order.end());
    std::vector<std::int64_t> all(10);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(order, all) << "epoch " << epoch;
  }
  EXPECT_EQ(orders.size(), 4U);
}

TEST_F(DataTest, FewerWindowsThanAStepNeedsAreUsedAgainInEqualParts) {
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    Dataset data({.files = {counting(3)}, .sequence = 4, .seed = 1});
    EXPECT_EQ(windows_of(data, device_, {.ranks = 4, .micro_batch = 2}, rank, 0).size(), 2U);
  }
  std::map<std::int64_t, int> uses;
  for (std::int64_t step = 0; step < 3; ++step)
    for (std::int64_t rank = 0; rank < 4; ++rank) {
      Dataset data({.files = {counting(3)}, .sequence = 4, .seed = 1});
      for (std::int64_t id : windows_of(data, device_, {.ranks = 4, .micro_batch = 2}, rank, step)) ++uses[id];
    }
  EXPECT_EQ(uses, (std::map<std::int64_t, int>{{0, 8}, {1, 8}, {2, 8}}));
}

TEST_F(DataTest, AStepCanBeReachedWithoutTheStepsBeforeIt) {
  const fs::path path = counting(10);
  Dataset walked({.files = {path}, .sequence = 4, .seed = 9}), jumped({.files = {path}, .sequence = 4, .seed = 9});
  std::vector<std::int64_t> last;
  for (std::int64_t g = 0; g <= 57; ++g) last.push_back(walked.window(g));
  EXPECT_EQ(jumped.window(57), last[57]);
  EXPECT_EQ(jumped.window(3), last[3]);
}

TEST_F(DataTest, TheSeedDecidesTheOrder) {
  const fs::path path = counting(48);
  const auto order = [&](std::uint64_t seed) {
    Dataset data({.files = {path}, .sequence = 4, .seed = seed});
    std::vector<std::int64_t> ids;
    for (std::int64_t g = 0; g < 48; ++g) ids.push_back(data.window(g));
    return ids;
  };
  EXPECT_EQ(order(1), order(1));
  EXPECT_NE(order(1), order(2));
}

TEST_F(DataTest, HeldOutWindowsAreTheLastAndAreNeverTrainedOn) {
  Dataset data({.files = {counting(22)}, .sequence = 4, .seed = 1, .held_out = 12, .evaluation = 12});
  EXPECT_EQ(data.train_windows(), 10);
  for (std::int64_t g = 0; g < 40; ++g) EXPECT_LT(data.window(g), 10);
  for (const std::int64_t ranks : {1, 2, 3}) {
    const BatchGrid grid{.ranks = ranks, .micro_batch = 2};
    EXPECT_EQ(data.evaluation_batches(grid), 6 / ranks);
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < data.evaluation_batches(grid); ++i)
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        const Batch batch = data.evaluation_batch(device_, grid, rank, i);
        for (std::int64_t b = 0; b < 2; ++b) ids.push_back(batch.tokens.data<std::int32_t>()[b * 4] / 4);
      }
    EXPECT_EQ(ids, (std::vector<std::int64_t>{10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21})) << ranks << " ranks";
  }
  EXPECT_THROW(data.evaluation_batches({.ranks = 5, .micro_batch = 1}), LogicError);
}

TEST_F(DataTest, AnEvaluationDoesNotChangeWhatIsTrainedOn) {
  const fs::path path = counting(12);
  Dataset without({.files = {path}, .sequence = 4, .seed = 1});
  Dataset with({.files = {path}, .sequence = 4, .seed = 1, .evaluation = 4});
  for (std::int64_t g = 0; g < 30; ++g) EXPECT_EQ(with.window(g), without.window(g));
  EXPECT_EQ(with.evaluation_batch(device_, {.ranks = 1, .micro_batch = 4}, 0, 0).tokens.data<std::int32_t>()[0] / 4, 8);
  EXPECT_EQ(refusal({.files = {path}, .sequence = 4, .evaluation = 13}),
            "eval.batches: an evaluation reads 13 windows of 5 tokens, but data.files hold 12");
}

TEST_F(DataTest, WhatCannotBeUsedIsRefusedWithItsPathOrBothNumbers) {
  const std::string missing = (folder_ / "missing").string();
  EXPECT_EQ(refusal({.files = {missing}, .sequence = 4}),
            "data.files: cannot read " + missing + ": No such file or directory");
  const fs::path empty = file("empty", "");
  EXPECT_EQ(refusal({.files = {counting(1), empty}, .sequence = 4}), "data.files: " + empty.string() + " is empty");
  EXPECT_EQ(refusal({.files = {folder_}, .sequence = 4}), "data.files: " + folder_.string() + " is not a regular file");
  EXPECT_EQ(refusal({.files = {}, .sequence = 4}), "data.files: names no file");
  EXPECT_EQ(refusal({.files = {file("four", "abcd")}, .sequence = 4}),
            "data.files: hold 4 tokens in all, but one window of data.sequence 4 needs 5");
  EXPECT_EQ(refusal({.files = {counting(3)}, .sequence = 4, .held_out = 3}),
            "data.held_out: value 3 leaves none of the 3 windows of 5 tokens in data.files to train on; allowed: an "
            "integer from 0 to 2");
  EXPECT_EQ(refusal({.files = {counting(3)}, .sequence = 4, .evaluation = 4}),
            "eval.batches: an evaluation reads 4 windows of 5 tokens, but data.files hold 3");
  EXPECT_EQ(refusal({.files = {counting(3)}, .sequence = 0}), "data.sequence: must be at least 1, but is 0");
}

TEST_F(DataTest, AMetaRunCountsABatchAndReadsNothing) {
  CpuDevice meta(Allocator::Mode::Meta);
  Dataset data({.files = {counting(3)}, .sequence = 4});
  const Batch batch = data.batch(meta, {.ranks = 1, .micro_batch = 3}, 0, 0, 0);
  EXPECT_EQ(meta.memory.live(Tag::Workspace), 2 * 3 * 4 * 4);
  EXPECT_EQ(batch.tokens.data<std::int32_t>(), nullptr);
}

TEST_F(DataTest, TheOrderIsTheOneTheGoldenScriptMakes) {
  for (const char* name : {"gpt2", "quickstart"}) {
    const fs::path golden = fs::path(REGATHER_SOURCE_DIR) / "tests/golden";
    const nlohmann::json expected = nlohmann::json::parse(std::ifstream(golden / (std::string(name) + ".json")));
    Dataset data(
        {.files = {golden / "text.txt"}, .sequence = expected["train"]["sequence"], .seed = expected["train"]["seed"]});
    for (std::size_t g = 0; g < expected["order"].size(); ++g)
      ASSERT_EQ(data.window(static_cast<std::int64_t>(g)), expected["order"][g]) << name << ", sample " << g;
  }
}

}  // namespace
}  // namespace regather
