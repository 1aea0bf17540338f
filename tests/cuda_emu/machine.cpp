#include "tests/cuda_emu/machine.h"

#include <cuda_runtime_api.h>

#include <exception>
#include <thread>

#include "tests/cuda_emu/fibers.h"
#include "tests/cuda_emu/meetings.h"
#include "tests/cuda_emu/state.h"

namespace cuda_emu {

Machine::Machine(const Options& options) : state_(std::make_unique<State>(options)) {}

Machine::~Machine() {
  while (state_->step()) {
  }
}

const std::vector<std::string>& Machine::findings() const { return state_->findings; }
std::vector<std::string> Machine::take_findings() { return std::exchange(state_->findings, {}); }
Ledger& Machine::ledger() { return state_->ledger; }
std::size_t Machine::used_bytes(int device) const { return state_->devices.at(static_cast<std::size_t>(device))->used; }
std::size_t Machine::peak_bytes(int device) const { return state_->devices.at(static_cast<std::size_t>(device))->peak; }
std::size_t Machine::pinned_bytes() const {
  std::size_t sum = 0;
  for (const auto& [data, bytes] : state_->pinned) sum += bytes;
  return sum;
}
int Machine::communicators() const { return state_->communicators; }
int Machine::communicators_made() const { return state_->communicators_made; }
void Machine::fail_collective(int rank, std::int64_t n) { state_->failing_collective.emplace(rank, n); }
void Machine::fail_kernel(int rank, std::int64_t n) { state_->failing_kernel.emplace(rank, n); }

void Machine::run_ranks(int ranks, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(ranks));
  {
    std::vector<std::jthread> threads;
    for (int r = 0; r < ranks; ++r)
      threads.emplace_back([&, r] {
        const Rank rank(*this, r, ranks);
        try {
          body(r);
        } catch (...) {
          errors[static_cast<std::size_t>(r)] = std::current_exception();
        }
      });
  }
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

Rank::Rank(Machine& machine, int rank, int ranks) : state_(*machine.state_) { state_.join(rank, ranks); }
Rank::~Rank() {
  cudaDeviceSynchronize();
  state_.leave();
}

void yield() { state().let_others_go_on(); }

}  // namespace cuda_emu
