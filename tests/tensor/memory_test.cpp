#include "tensor/memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "tensor/arena.h"
#include "tensor/error.h"
#include "tests/message_of.h"

namespace regather {
namespace {

constexpr std::int64_t kKiB = 1024, kMiB = 1024 * kKiB;

std::string refusal(Allocator& memory, std::int64_t bytes, Tag tag) {
  try {
    memory.allocate(bytes, tag);
  } catch (const OutOfMemory& e) {
    EXPECT_EQ(e.code(), ExitCode::OutOfMemory);
    return e.what();
  }
  ADD_FAILURE() << "the request was not refused";
  return "";
}

TEST(Allocator, CountsRequestedBytesByTagLiveAndPeak) {
  for (const auto mode : {Allocator::Mode::Real, Allocator::Mode::Meta}) {
    Allocator memory(mode);
    {
      const Buffer parameters(memory, 1001, Tag::Parameters);
      EXPECT_EQ(memory.live(Tag::Parameters), 1001);
      {
        const Buffer activations(memory, 5 * kMiB + 3, Tag::Activations);
        EXPECT_EQ(memory.live_total(), 1001 + 5 * kMiB + 3);
      }
      const Buffer workspace(memory, 7, Tag::Workspace);
      const Buffer host(memory, 9 * kMiB, Tag::Host);
      EXPECT_EQ(memory.live(Tag::Activations), 0);
      EXPECT_EQ(memory.live_total(), 1008);
      EXPECT_EQ(memory.live(Tag::Host), 9 * kMiB);
    }
    EXPECT_EQ(memory.live_total(), 0);
    EXPECT_EQ(memory.live_by_tag(), BytesByTag{});
    EXPECT_EQ(memory.peak_total(), 1001 + 5 * kMiB + 3);
    EXPECT_EQ(memory.peak(Tag::Activations), 5 * kMiB + 3);
    EXPECT_EQ(memory.peak(Tag::Workspace), 7);
    EXPECT_EQ(memory.peak(Tag::Host), 9 * kMiB);
  }
}

TEST(Allocator, AtPeakIsTheFirstMomentOfTheHighestTotal) {
  Allocator memory(Allocator::Mode::Meta);
  {
    const Buffer a(memory, 100, Tag::Parameters);
    const Buffer b(memory, 50, Tag::Activations);
  }
  // As high as before, but not higher: the snapshot stays.
  const Buffer c(memory, 150, Tag::Workspace);
  EXPECT_EQ(memory.at_peak()[index(Tag::Parameters)], 100);
  EXPECT_EQ(memory.at_peak()[index(Tag::Activations)], 50);
  EXPECT_EQ(memory.at_peak()[index(Tag::Workspace)], 0);
  const Buffer d(memory, 1, Tag::Gradients);
  EXPECT_EQ(memory.peak_total(), 151);
  EXPECT_EQ(memory.at_peak()[index(Tag::Parameters)], 0);
  EXPECT_EQ(memory.at_peak()[index(Tag::Workspace)], 150);
  EXPECT_EQ(memory.at_peak()[index(Tag::Gradients)], 1);
}

TEST(Allocator, RestartedPeaksBeginAtWhatIsLive) {
  Allocator memory(Allocator::Mode::Meta);
  const Buffer kept(memory, 10, Tag::Parameters);
  { const Buffer passing(memory, 90, Tag::Activations); }
  memory.restart_peaks();
  EXPECT_EQ(memory.peak_total(), 10);
  EXPECT_EQ(memory.peak(Tag::Activations), 0);
  EXPECT_EQ(memory.peak(Tag::Parameters), 10);
  EXPECT_EQ(memory.at_peak()[index(Tag::Parameters)], 10);
}

TEST(Allocator, LimitIsExactAndHostDoesNotCount) {
  for (const auto mode : {Allocator::Mode::Real, Allocator::Mode::Meta}) {
    Allocator memory(mode, 1000);
    const Buffer host(memory, 5000, Tag::Host);
    const Buffer a(memory, 400, Tag::Parameters);
    const Buffer b(memory, 600, Tag::Activations);
    EXPECT_THROW(Buffer(memory, 1, Tag::Workspace), OutOfMemory);
    EXPECT_EQ(memory.live_total(), 1000);
    const Buffer more_host(memory, 5000, Tag::Host);
    const Buffer nothing(memory, 0, Tag::Workspace);
    memory.set_limit(1001);
    const Buffer c(memory, 1, Tag::Workspace);
    EXPECT_EQ(memory.live_total(), 1001);
  }
}

TEST(Allocator, HugeRequestDoesNotOverflowTheLimit) {
  Allocator memory(Allocator::Mode::Meta, 1000);
  const Buffer a(memory, 400, Tag::Parameters);
  EXPECT_THROW(memory.allocate(INT64_MAX, Tag::Workspace), OutOfMemory);
  EXPECT_THROW(memory.allocate(-1, Tag::Workspace), LogicError);
  EXPECT_EQ(memory.live_total(), 400);
}

TEST(Allocator, RefusalSaysWhoAskedForWhatAndWhoHoldsWhat) {
  Allocator memory(Allocator::Mode::Meta, 10 * kMiB);
  const Buffer a(memory, 3 * kMiB, Tag::Parameters);
  const Buffer b(memory, 5 * kMiB, Tag::Activations);
  const Buffer h(memory, 77 * kMiB, Tag::Host);
  const Allocator::Asking outer(memory, "block 3");
  std::string text;
  {
    const Allocator::Asking asking(memory, "linear (mlp.up)");
    text = refusal(memory, 4 * kMiB, Tag::Workspace);
  }
  EXPECT_TRUE(contains(text, "linear (mlp.up) asks for 4.00 MiB of workspace (4194304 bytes), over the limit")) << text;
  EXPECT_TRUE(contains(text, "the limit is 10.00 MiB (10485760 bytes), 2.00 MiB of it free")) << text;
  const auto row = [&](std::string_view name) {
    const std::size_t at = text.find("  " + std::string(name) + " ");
    return at == std::string::npos ? "" : text.substr(at, text.find('\n', at) - at);
  };
  EXPECT_TRUE(contains(row("parameters"), "3145728")) << text;
  EXPECT_TRUE(contains(row("activations"), "5242880")) << text;
  EXPECT_TRUE(contains(row("optimizer"), " 0")) << text;
  EXPECT_TRUE(contains(row("total"), "8388608")) << text;
  EXPECT_TRUE(contains(row("host"), "77.00 MiB")) << text;
  EXPECT_TRUE(contains(refusal(memory, 4 * kMiB, Tag::Workspace), "block 3 asks for")) << "the inner name has ended";
}

TEST(Allocator, MoreThanTheSystemHasIsOutOfMemoryAndLeavesNoTrace) {
  Allocator memory;
  std::vector<Allocator::Event> log;
  memory.log = &log;
  const Allocator::Asking asking(memory, "attention");
  const std::string text = refusal(memory, std::int64_t{1} << 60, Tag::Activations);
  EXPECT_TRUE(contains(text, "attention asks for")) << text;
  EXPECT_TRUE(contains(text, "the system has no more")) << text;
  EXPECT_EQ(memory.live_total(), 0);
  EXPECT_EQ(memory.peak_total(), 0);
  EXPECT_TRUE(log.empty());
}

TEST(Allocator, MetaRunCountsTheSameAndHasNoMemory) {
  std::vector<Allocator::Event> logs[2];
  BytesByTag peaks[2];
  for (const int meta : {0, 1}) {
    Allocator memory(meta ? Allocator::Mode::Meta : Allocator::Mode::Real);
    memory.log = &logs[meta];
    Buffer a(memory, 3 * kMiB + 1, Tag::Gathered);
    Buffer empty(memory, 0, Tag::Gathered);
    const Buffer b(memory, 17, Tag::Optimizer);
    a = Buffer(memory, 4 * kMiB, Tag::Activations);
    EXPECT_EQ(a.data() == nullptr, meta == 1);
    EXPECT_EQ(empty.data(), nullptr);
    EXPECT_EQ(memory.system_bytes() == 0, meta == 1);
    peaks[meta] = memory.at_peak();
  }
  EXPECT_EQ(logs[0], logs[1]);
  EXPECT_EQ(peaks[0], peaks[1]);
  const std::vector<Allocator::Event> expected = {{Tag::Gathered, 3 * kMiB + 1}, {Tag::Optimizer, 17},
                                                  {Tag::Activations, 4 * kMiB},  {Tag::Gathered, -3 * kMiB - 1},
                                                  {Tag::Optimizer, -17},         {Tag::Activations, -4 * kMiB}};
  EXPECT_EQ(logs[0], expected);
}

TEST(Allocator, RepeatedSequenceTakesNothingMoreFromTheSystem) {
  Allocator memory;
  const Buffer parameters(memory, 11 * kMiB, Tag::Parameters);
  const auto step = [&] {
    std::mt19937 random(7);
    std::vector<Buffer> live;
    for (int i = 0; i < 500; ++i) {
      const std::int64_t bytes =
          random() % 4 == 0 ? 1 + random() % 100 : 1 + random() % static_cast<unsigned>(3 * kMiB);
      live.emplace_back(memory, bytes, Tag::Activations);
      if (live.size() > 20) live.erase(live.begin() + static_cast<std::ptrdiff_t>(random() % live.size()));
    }
  };
  step();
  const std::int64_t after_first = memory.system_bytes();
  for (int i = 0; i < 5; ++i) step();
  EXPECT_EQ(memory.system_bytes(), after_first);
  EXPECT_LE(static_cast<double>(after_first), 1.15 * static_cast<double>(memory.peak_total()) + 64 * kMiB);
}

// The shape of a training step: block inputs stay, a block's values come and go in both directions, gathered copies
// rotate.
TEST(Allocator, StepOfShardedBlocksStaysWithinTheFragmentationBound) {
  Allocator memory;
  std::vector<Buffer> shards, inputs, slots(2);
  constexpr int kBlocks = 12;
  for (int i = 0; i < kBlocks; ++i) shards.emplace_back(memory, 9 * kMiB + 4 * i, Tag::Optimizer);
  std::int64_t taken = 0;
  for (int step = 0; step < 3; ++step) {
    const auto use_block = [&](int block, bool backward) {
      slots[static_cast<std::size_t>(block % 2)] = Buffer();
      slots[static_cast<std::size_t>(block % 2)] = Buffer(memory, 6 * kMiB + 4 * block, Tag::Gathered);
      std::vector<Buffer> values;
      for (const std::int64_t bytes :
           {2 * kMiB, 6 * kMiB, 2 * kMiB + 48 * kKiB, 48 * kKiB, 2 * kMiB, 8 * kMiB, 8 * kMiB}) {
        values.emplace_back(memory, bytes, Tag::Activations);
      }
      if (!backward) return;
      const Buffer gradients(memory, 6 * kMiB + 4 * block, Tag::Workspace);
      for (std::size_t i = values.size(); i-- > 0;) {
        const Buffer gradient(memory, values[i].bytes(), Tag::Workspace);
        values[i] = Buffer();
      }
    };
    for (int block = 0; block < kBlocks; ++block) {
      inputs.emplace_back(memory, 2 * kMiB, Tag::Activations);
      use_block(block, false);
    }
    for (int block = kBlocks; block-- > 0; inputs.pop_back()) use_block(block, true);
    if (step == 0) taken = memory.system_bytes();
  }
  EXPECT_EQ(memory.system_bytes(), taken);
  EXPECT_LE(static_cast<double>(taken), 1.15 * static_cast<double>(memory.peak_total()) + 4 * kMiB);
}

// The table of embeddings is gathered for the step's begin and again for its end; between them values are kept that
// would fit into the hole.
TEST(Allocator, ValuesDoNotCutUpTheRoomThatATableOfEmbeddingsLeft) {
  Allocator memory;
  constexpr std::int64_t kTable = 64 * kMiB, kSlot = 12 * kMiB, kValue = kMiB;
  for (int step = 0; step < 2; ++step) {
    std::optional<Buffer> table(std::in_place, memory, kTable, Tag::Gathered);
    std::vector<Buffer> slots(2), inputs;
    for (int block = 0; block < 12; ++block) {
      Buffer& slot = slots[static_cast<std::size_t>(block % 2)];
      slot = Buffer();
      slot = Buffer(memory, kSlot, Tag::Gathered);
      inputs.emplace_back(memory, kValue, Tag::Activations);
      table.reset();
    }
    table.emplace(memory, kTable, Tag::Gathered);
    const Buffer gradient(memory, kTable, Tag::Workspace);
    while (!inputs.empty()) inputs.pop_back();
  }
  EXPECT_LE(static_cast<double>(memory.system_bytes()), 1.02 * static_cast<double>(memory.peak_total()) + 4 * kMiB);
}

TEST(Allocator, BuffersAreAlignedForVectorsAndLargeOnesForPages) {
  Allocator memory;
  std::vector<Buffer> live;
  for (const std::int64_t bytes : {1, 63, 65, 4095, 32767, 32768, 40001, 5000001}) {
    live.emplace_back(memory, bytes, Tag::Workspace);
    const auto address = reinterpret_cast<std::uintptr_t>(live.back().data());
    EXPECT_EQ(address % (bytes < static_cast<std::int64_t>(Arena::kSmall) ? 64 : 4096), 0U) << bytes;
  }
  const Buffer large(memory, 64 * kMiB, Tag::Workspace);
  Allocator other;
  const Buffer first(other, 64 * kMiB, Tag::Workspace);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first.data()) % Arena::kHugePage, 0U);
}

TEST(Allocator, BuffersNeverOverlap) {
  Allocator memory;
  std::mt19937 random(3);
  std::vector<std::pair<Buffer, unsigned char>> live;
  const auto intact = [](const std::pair<Buffer, unsigned char>& entry) {
    const auto* data = entry.first.data<unsigned char>();
    return std::all_of(data, data + entry.first.bytes(), [&](unsigned char c) { return c == entry.second; });
  };
  for (int i = 0; i < 2000; ++i) {
    const auto limit = random() % 8 == 0 ? 300000U : random() % 2 == 0 ? 40000U : 200U;
    Buffer buffer(memory, 1 + random() % limit, Tag::Workspace);
    const auto mark = static_cast<unsigned char>(random());
    std::memset(buffer.data(), mark, static_cast<std::size_t>(buffer.bytes()));
    live.emplace_back(std::move(buffer), mark);
    if (live.size() > 40) {
      const std::size_t victim = random() % live.size();
      ASSERT_TRUE(intact(live[victim])) << "step " << i;
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(victim));
    }
  }
  for (const auto& entry : live) EXPECT_TRUE(intact(entry));
}

TEST(Buffer, MovesWithoutAllocatingAndFreesOnce) {
  Allocator memory;
  Buffer a(memory, 1000, Tag::Gathered);
  void* const data = a.data();
  Buffer b = std::move(a);
  EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move): a moved-from buffer is empty
  EXPECT_EQ(b.data(), data);
  Buffer c(memory, 500, Tag::Optimizer);
  c = std::move(b);
  EXPECT_EQ(memory.live(Tag::Optimizer), 0);
  EXPECT_EQ(memory.live(Tag::Gathered), 1000);
  c = Buffer();
  EXPECT_EQ(memory.live_total(), 0);
}

#if !defined(NDEBUG) && !defined(__SANITIZE_THREAD__)
TEST(Allocator, FreshMemoryIsNotANumber) {
  Allocator memory;
  for (int round = 0; round < 2; ++round) {  // also when it was used before
    const Buffer buffer(memory, 256 * kKiB, Tag::Activations);
    auto* data = buffer.data<float>();
    EXPECT_TRUE(std::all_of(data, data + 64 * kKiB, [](float x) { return std::isnan(x); }));
    std::fill(data, data + 64 * kKiB, 1.0F);
  }
}
#endif

#ifndef NDEBUG
TEST(AllocatorDeathTest, WrongReleasesAreCaught) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        Allocator memory;
        void* data = memory.allocate(100000, Tag::Activations);
        memory.release(data, 100000, Tag::Workspace);
      },
      "more of a tag than is live");
  EXPECT_DEATH(
      {
        Allocator memory;
        void* data = memory.allocate(100000, Tag::Activations);
        memory.release(data, 99999, Tag::Activations);
      },
      "another size");
  EXPECT_DEATH(
      {
        Allocator memory;
        memory.allocate(100, Tag::Activations);
      },
      "outlives");
}
#endif

#if defined(__SANITIZE_ADDRESS__)
TEST(AllocatorDeathTest, TouchingFreedMemoryOrPastTheEndIsCaught) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        Allocator memory;
        const volatile char* data = nullptr;
        { data = Buffer(memory, 100000, Tag::Activations).data<char>(); }
        static_cast<void>(data[5]);
      },
      "use-after-poison");
  EXPECT_DEATH(
      {
        Allocator memory;
        const Buffer buffer(memory, 4096 * 16, Tag::Activations);
        buffer.data<volatile char>()[4096 * 16] = 1;
      },
      "use-after-poison");
}
#endif

}  // namespace
}  // namespace regather
