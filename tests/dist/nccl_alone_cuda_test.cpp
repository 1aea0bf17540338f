// NCCL with one rank: every call of the communicator, where a single GPU is all there is. Runs on the emulator, and in
// gpu_tests with NVIDIA's NCCL.
#include <gtest/gtest.h>

#include <numeric>

#include "tests/dist/cuda_ranks.h"

namespace regather::testing {
namespace {

constexpr std::int64_t kShard = 1000;
const Label kLabel{.unit = "block 0", .pass = Pass::Forward};

// kShard elements from 0 up, on the device.
template <class T>
Buffer counted(CudaDevice& device) {
  std::vector<T> values(kShard);
  std::iota(values.begin(), values.end(), T{0});
  Buffer buffer(device.memory, kShard * static_cast<std::int64_t>(sizeof(T)), Tag::Workspace);
  device.write(Stream::Compute, buffer.data(), values.data(), buffer.bytes());
  return buffer;
}
template <class T>
void expect_counted(CudaDevice& device, const Buffer& buffer, T factor) {
  std::vector<T> values(kShard);
  device.read(Stream::Compute, values.data(), buffer.data(), buffer.bytes());
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], factor * static_cast<T>(i));
}

void run_alone(const std::function<void(Communicator&, CudaDevice&)>& body) {
  cuda_emu::Machine machine({.devices = 1});
  const auto on_device = [&](Communicator& c, CudaDevice& device) {
    c.use_memory_of(device);
    body(c, device);
  };
  run_cuda_ranks(machine, 1, {}, make_nccl_transport, on_device);
  EXPECT_EQ(machine.findings(), std::vector<std::string>{});
  EXPECT_EQ(machine.communicators(), 0);
}

TEST(NcclAlone, gathers_in_place_what_is_there) {
  run_alone([](Communicator& c, CudaDevice& device) {
    const Buffer a = counted<float>(device), b = counted<std::int32_t>(device);
    device.wait(Stream::Gather, device.record(Stream::Compute));
    const std::vector<GatherBuffer> both = {{a.data(), kShard, DType::F32}, {b.data(), kShard, DType::I32}};
    device.wait(Stream::Compute, c.all_gather(both, kLabel));
    expect_counted<float>(device, a, 1);
    expect_counted<std::int32_t>(device, b, 1);
  });
}

TEST(NcclAlone, adds_a_reduction_to_what_is_there) {
  run_alone([](Communicator& c, CudaDevice& device) {
    const Buffer owned = counted<float>(device);
    for (int i = 0; i < 3; ++i) {
      const Buffer full = counted<float>(device);
      device.wait(Stream::Reduce, device.record(Stream::Compute));
      device.wait(Stream::Compute, c.reduce_scatter(full.data<float>(), owned.data<float>(), kShard, kLabel));
    }
    expect_counted<float>(device, owned, 4);
  });
}

TEST(NcclAlone, is_aborted_when_its_rank_fails_with_work_in_flight) {
  const auto fails = [](Communicator& c, CudaDevice& device) {
    const Buffer a = counted<float>(device);
    device.wait(Stream::Gather, device.record(Stream::Compute));
    const GatherBuffer buffer{a.data(), kShard, DType::F32};
    const Event arrival = c.all_gather({&buffer, 1}, kLabel);
    throw Error("this rank fails");
  };
  EXPECT_THROW(run_alone(fails), Error);
}

}  // namespace
}  // namespace regather::testing
