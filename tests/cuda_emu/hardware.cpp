// In place of the emulator where tests run on a GPU: a machine that finds nothing, whose threads run as they run.
#include "tests/cuda_emu/machine.h"

namespace cuda_emu {

struct State {
  std::vector<std::string> findings;
};

Machine::Machine(const Options&) : state_(std::make_unique<State>()) {}
Machine::~Machine() = default;
const std::vector<std::string>& Machine::findings() const { return state_->findings; }

}  // namespace cuda_emu
