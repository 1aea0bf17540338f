// In place of the emulator where tests run on a GPU: a machine that finds nothing, whose threads run as they run; and a
// program that, where there is no GPU, says so in one line and ends with exit code 2.
#include <gtest/gtest.h>

#include <cstdio>
#include <thread>

#include "tensor/device.h"
#include "tensor/error.h"
#include "tests/cuda_emu/machine.h"

namespace cuda_emu {

struct State {
  std::vector<std::string> findings;
};

Machine::Machine(const Options&) : state_(std::make_unique<State>()) {}
Machine::~Machine() = default;
const std::vector<std::string>& Machine::findings() const { return state_->findings; }
int Machine::communicators() const { return 0; }
Rank::Rank(Machine& machine, int, int) : state_(*machine.state_) {}
Rank::~Rank() = default;
void yield() { std::this_thread::yield(); }

}  // namespace cuda_emu

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  try {
    if (!::testing::FLAGS_gtest_list_tests) regather::cuda_gpus();
  } catch (const regather::UsageError& e) {
    std::fprintf(stderr, "gpu_tests: %s\n", e.what());
    return static_cast<int>(e.code());
  }
  return RUN_ALL_TESTS();
}
