#include "launcher/run_device.h"

#include <gtest/gtest.h>

namespace regather::testing {
namespace {

TEST(RunDevice, RanksOfAMachineThatSeeTheSameGpusTakeOneEach) {
  const SeenGpus first{"node1", {"a", "b"}}, second{"node2", {"c", "d"}};
  const SeenGpus mixed[] = {first, second, first, second};  // ranks are not placed machine by machine
  EXPECT_EQ(choose_gpus(mixed), (std::vector{0, 0, 1, 1}));
}

TEST(RunDevice, ALauncherMayShowEachRankItsOwnGpu) {
  const SeenGpus own[] = {{"node1", {"a"}}, {"node1", {"b"}}, {"node1", {"c", "a"}}};
  EXPECT_EQ(choose_gpus(own), (std::vector{0, 0, 0}));
}

TEST(RunDevice, MoreRanksThanGpusShareThemEvenly) {
  const SeenGpus there{"node1", {"a"}}, here{"node2", {"b", "c"}};
  const SeenGpus seen[] = {there, here, here, here, here};
  EXPECT_EQ(choose_gpus(seen), (std::vector{0, 0, 1, 0, 1}));
}

TEST(RunDevice, RanksOfACpuShareTheMachinesMemory) {
  const Config config = parse_config("data: {files: [a]}\n", "c.yaml");
  run_ranks(3, {}, [&](Communicator& comm) {
    const RunDevice run = take_run_device(config, comm, 1 << 20);
    EXPECT_EQ(run.device->kind(), DeviceKind::Cpu);
    EXPECT_EQ(run.device->memory.limit(), 1 << 20);
    EXPECT_EQ(run.sharing, 3);
    EXPECT_TRUE(run.device->between_ops);
  });
}

// On a machine without a GPU, and in a build without CUDA.
TEST(RunDevice, ARankWithoutAGpuEndsEveryRankWithTheSameWords) {
  try {
    cuda_gpus();
    GTEST_SKIP() << "there is a GPU";
  } catch (const UsageError& why) {
    const Config config = parse_config("data: {files: [a]}\ndevice: cuda\n", "c.yaml");
    std::array<std::string, 2> said;
    run_ranks(2, {}, [&](Communicator& comm) {
      try {
        take_run_device(config, comm, 0);
      } catch (const UsageError& e) {
        said[static_cast<std::size_t>(comm.rank())] = e.what();
      }
    });
    EXPECT_TRUE(said[0].starts_with(std::string(why.what()) + " (rank 0, on ")) << said[0];
    EXPECT_EQ(said[1], said[0]);
  }
}

}  // namespace
}  // namespace regather::testing
