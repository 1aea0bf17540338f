// Values on their way to the host and back, with slow, late and failing copies.
#include "tensor/offload.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

namespace regather {
namespace {

constexpr std::int64_t kNumbers = 1 << 12;

Tensor numbers(Device& device, float first, std::int64_t n = kNumbers) {
  Tensor t(device.memory, {n}, Tag::Activations);
  for (std::int64_t i = 0; i < n; ++i) t.fresh()[i] = first + static_cast<float>(i);
  return t;
}
bool holds(const Tensor& t, float first) {
  for (std::int64_t i = 0; i < t.numel(); ++i)
    if (t.data()[i] != first + static_cast<float>(i)) return false;
  return true;
}

// Slows the copies of the given streams.
void delay(CpuDevice& device, std::vector<Stream> streams,
           std::chrono::milliseconds by = std::chrono::milliseconds(2)) {
  device.before_copy = [streams, by](Stream stream, std::int64_t) {
    if (std::ranges::find(streams, stream) != streams.end()) std::this_thread::sleep_for(by);
  };
}

TEST(Offload, ValuesComeBackUnderAnyDelay) {
  for (const auto& slow :
       std::vector<std::vector<Stream>>{{}, {Stream::ToHost}, {Stream::ToDevice}, {Stream::ToHost, Stream::ToDevice}})
    for (const bool leaves : {false, true})
      for (const bool fetches : {false, true}) {
        CpuDevice device;
        delay(device, slow);
        Offloader offloader(device);
        for (int round = 0; round < 3; ++round) {  // later rounds use the same host memory again
          std::vector<Offloaded> away;
          for (int i = 0; i < 4; ++i)
            away.emplace_back(offloader, numbers(device, static_cast<float>(1000 * i + round)));
          if (leaves)
            for (Offloaded& value : away) value.leave();
          EXPECT_EQ(device.memory.live(Tag::Activations), leaves ? 0 : 4 * kNumbers * 4);
          for (int i = 4; i-- > 0;) {
            if (fetches && i > 0) away[static_cast<std::size_t>(i) - 1].fetch();  // one ahead
            EXPECT_TRUE(holds(away[static_cast<std::size_t>(i)].take(), static_cast<float>(1000 * i + round)));
          }
          EXPECT_EQ(device.memory.live(Tag::Activations), 0);
        }
      }
}

TEST(Offload, HostMemoryIsTakenOnceAndUsedAgain) {
  std::vector<Allocator::Event> events;  // outlives the device, whose log it is
  CpuDevice device;
  Offloader offloader(device);
  const auto round = [&] {
    std::vector<Offloaded> away;
    for (const std::int64_t n : {kNumbers, kNumbers, kNumbers / 2}) {
      away.emplace_back(offloader, numbers(device, 0, n));
      away.back().leave();
    }
    for (Offloaded& value : away) value.take();
  };
  round();
  EXPECT_EQ(device.memory.live(Tag::Host), 10 * kNumbers);
  EXPECT_EQ(device.memory.live_total(), 0);  // not counted among the device's
  device.memory.log = &events;
  round();
  for (const Allocator::Event& e : events) EXPECT_NE(e.tag, Tag::Host);
  EXPECT_EQ(device.memory.peak(Tag::Host), 10 * kNumbers);
  EXPECT_EQ(offloader.moved_bytes(), 2 * 10 * kNumbers);
}

// Reading back the first value is slow; the next one is written to the same host memory meanwhile.
TEST(Offload, HostMemoryIsNotWrittenBeforeItWasRead) {
  CpuDevice device;
  delay(device, {Stream::ToDevice});
  Offloader offloader(device);
  Offloaded first(offloader, numbers(device, 1));
  first.leave();
  first.fetch();
  Offloaded dropped = std::move(first);
  Offloaded other(offloader, numbers(device, 7));  // room of its own: the first one's is in use
  EXPECT_EQ(device.memory.live(Tag::Host), 2 * kNumbers * 4);
  EXPECT_TRUE(holds(dropped.take(), 1));
  Offloaded again(offloader, numbers(device, 9));
  EXPECT_EQ(device.memory.live(Tag::Host), 2 * kNumbers * 4);
  EXPECT_TRUE(holds(other.take(), 7));
  EXPECT_TRUE(holds(again.take(), 9));
}

TEST(Offload, AFailingCopyIsAnErrorOfWhoeverNeedsTheValue) {
  for (const Stream broken : {Stream::ToHost, Stream::ToDevice}) {
    CpuDevice device;
    int copies = 0;
    device.before_copy = [&](Stream stream, std::int64_t bytes) {
      if (stream == broken && ++copies == 2) throw Error(fmt::format("the link is down ({} bytes)", bytes));
    };
    Offloader offloader(device);
    std::string text;
    {
      std::vector<Offloaded> away;
      try {
        for (int i = 0; i < 3; ++i) away.emplace_back(offloader, numbers(device, static_cast<float>(i)));
        for (Offloaded& value : away) value.leave();
        for (Offloaded& value : away) value.take();
      } catch (const Error& e) {
        text = e.what();
      }
    }  // what is under way ends without a second error
    EXPECT_EQ(text, "offload of activations: the link is down (16384 bytes)");
    EXPECT_EQ(device.memory.live(Tag::Activations), 0);
  }
}

TEST(Offload, WaitingForACopyIsCounted) {
  CpuDevice device;
  delay(device, {Stream::ToHost}, std::chrono::milliseconds(100));
  Offloader offloader(device);
  Offloaded value(offloader, numbers(device, 0));
  value.leave();  // a busy machine may come to it late
  EXPECT_GE(offloader.stalled_seconds(), 0.001);
  value.take();
  EXPECT_EQ(device.copies(Stream::ToHost).bytes, kNumbers * 4);
  EXPECT_EQ(device.copies(Stream::ToDevice).bytes, kNumbers * 4);
  EXPECT_GE(device.copies(Stream::ToHost).seconds, 0.1);
}

TEST(Offload, AStoragelessRunCountsTheSameMemory) {
  std::vector<Allocator::Event> events[2];
  for (const auto mode : {Allocator::Mode::Real, Allocator::Mode::Meta}) {
    CpuDevice device(mode);
    device.memory.log = &events[mode == Allocator::Mode::Meta ? 1 : 0];
    Offloader offloader(device);
    Offloaded value(offloader, Tensor(device.memory, {kNumbers}, Tag::Activations));
    value.leave();
    value.fetch();
    value.take();
  }
  EXPECT_EQ(events[0], events[1]);
  EXPECT_EQ(events[0].size(), 6U);
}

}  // namespace
}  // namespace regather
