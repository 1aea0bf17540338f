#include "tensor/device.h"

#include <gtest/gtest.h>

#include <cstring>

namespace regather {
namespace {

TEST(CpuDevice, CopiesAndZeroesAndDoesNothingInAMetaRun) {
  CpuDevice cpu;
  const Buffer a(cpu.memory, 64, Tag::Workspace), b(cpu.memory, 64, Tag::Workspace);
  std::memset(a.data(), 7, 64);
  cpu.copy(Stream::Compute, b.data(), a.data(), 64);
  EXPECT_EQ(std::memcmp(a.data(), b.data(), 64), 0);
  cpu.zero(Stream::Compute, b.data(), 32);
  EXPECT_EQ(b.data<char>()[31], 0);
  EXPECT_EQ(b.data<char>()[32], 7);
  EXPECT_TRUE(cpu.record(Stream::Gather).done());

  CpuDevice meta(Allocator::Mode::Meta, 100);
  EXPECT_TRUE(meta.meta());
  const Buffer c(meta.memory, 64, Tag::Workspace);
  meta.copy(Stream::Compute, c.data(), nullptr, 64);
  meta.zero(Stream::Compute, c.data(), 64);
  EXPECT_THROW(Buffer(meta.memory, 64, Tag::Workspace), OutOfMemory);
}

TEST(CpuDevice, AddsAlsoInPlace) {
  CpuDevice cpu;
  constexpr std::int64_t kN = 1037;
  const auto filled = [&](float scale) {
    Buffer buffer(cpu.memory, kN * 4, Tag::Workspace);
    for (std::int64_t i = 0; i < kN; ++i) buffer.data<float>()[i] = scale * static_cast<float>(i);
    return buffer;
  };
  for (const int target : {0, 1, 2}) {  // a new buffer, the first addend, the second
    const Buffer a = filled(2), b = filled(3), c = filled(0);
    float* const sum = (target == 0 ? c : target == 1 ? a : b).data<float>();
    cpu.add(Stream::Compute, sum, a.data<float>(), b.data<float>(), kN);
    for (std::int64_t i = 0; i < kN; ++i) ASSERT_EQ(sum[i], 5.0F * static_cast<float>(i)) << target << " " << i;
  }
  CpuDevice meta(Allocator::Mode::Meta);
  float* const none = nullptr;
  meta.add(Stream::Compute, none, none, none, kN);
}

}  // namespace
}  // namespace regather
