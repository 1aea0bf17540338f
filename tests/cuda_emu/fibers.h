// The threads of a block as fibers, on stacks that are used again. A fiber runs CUDA threads until one has to wait;
// threads that never wait share one stack without a switch. Invariant: only the scheduler resumes a fiber, and a fiber
// goes back to the scheduler only.
#pragma once
#include <boost/context/fiber.hpp>

#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace cuda_emu {

class FiberPool {
 public:
  struct Fiber {
    boost::context::fiber context;
    const void* stack_bottom = nullptr;
    std::size_t stack_bytes = 0;
    void* fake_stack = nullptr;  // AddressSanitizer's
    void* sanitizer = nullptr;   // ThreadSanitizer's, of the CUDA thread that it runs
    std::vector<Fiber*>* home;   // where it is while it is idle
    std::function<void()> work;  // what it does at the next resume, when it is idle
  };

  FiberPool();
  ~FiberPool();
  FiberPool(const FiberPool&) = delete;
  FiberPool& operator=(const FiberPool&) = delete;

  Fiber& idle_fiber();
  void resume(Fiber& fiber);  // until it waits or its work is done; a fiber whose work is done is idle
  void wait();                // called on a fiber: back to the scheduler, until resumed

 private:
  std::vector<Fiber*>& idle_of_this_stream();
  void begin(Fiber& fiber);
  void main_of(Fiber& fiber);

  std::vector<std::unique_ptr<Fiber>> all_;
  // By what ThreadSanitizer takes a stream for: what two streams do on one stack it would take for a race.
  std::map<const void*, std::vector<Fiber*>> idle_;
  Fiber* running_ = nullptr;
  bool stopping_ = false;
  boost::context::fiber scheduler_;
  void* scheduler_fake_stack_ = nullptr;
  void* scheduler_sanitizer_ = nullptr;
  const void* scheduler_bottom_ = nullptr;
  std::size_t scheduler_bytes_ = 0;
};

}  // namespace cuda_emu
