#include "tests/cuda_emu/fibers.h"

#include <boost/context/protected_fixedsize_stack.hpp>
#include <optional>

#include "tests/cuda_emu/sanitizers.h"

namespace cuda_emu {
namespace {

constexpr std::size_t kStackBytes = 128 << 10;

// Says where the stack is, for AddressSanitizer.
struct KnownStack {
  FiberPool::Fiber* fiber;
  boost::context::protected_fixedsize_stack stacks{kStackBytes};
  boost::context::stack_context allocate() {
    const boost::context::stack_context stack = stacks.allocate();
    fiber->stack_bytes = stack.size;
    fiber->stack_bottom = static_cast<char*>(stack.sp) - stack.size;
    return stack;
  }
  void deallocate(boost::context::stack_context& stack) {
    unpoison(static_cast<char*>(stack.sp) - stack.size, stack.size);
    stacks.deallocate(stack);
  }
};

}  // namespace

FiberPool::FiberPool() = default;
FiberPool::~FiberPool() {
  stopping_ = true;
  for (const auto& fiber : all_)
    if (fiber->context) resume(*fiber);
}

std::vector<FiberPool::Fiber*>& FiberPool::idle_of_this_stream() {
  const auto found = idle_.find(this_fiber());
  if (found != idle_.end() && !found->second.empty()) return found->second;
  const Unseen unseen;
  std::vector<Fiber*>& idle = idle_[this_fiber()];
  idle.push_back(all_.emplace_back(std::make_unique<Fiber>()).get());
  idle.reserve(all_.size());  // to come back allocates nothing
  idle.back()->home = &idle;
  return idle;
}

FiberPool::Fiber& FiberPool::idle_fiber() {
  std::vector<Fiber*>& idle = idle_of_this_stream();
  Fiber& fiber = *idle.back();
  idle.pop_back();
  if (!fiber.context) begin(fiber);
  return fiber;
}

void FiberPool::begin(Fiber& fiber) {
  const Unseen unseen;
  fiber.context = boost::context::fiber(std::allocator_arg, KnownStack{&fiber}, [this, &fiber](auto&& scheduler) {
    entered_stack(nullptr, &scheduler_bottom_, &scheduler_bytes_);
    scheduler_ = std::move(scheduler);
    main_of(fiber);
    leaving_stack(nullptr, scheduler_bottom_, scheduler_bytes_);
    return std::move(scheduler_);
  });
}

// A CUDA thread that is one of ThreadSanitizer's threads is also one that uses this stack: it would take what another
// does there for a race. So such a one has a stack of its own. Others are in their stream, which is Unseen already.
void FiberPool::main_of(Fiber& fiber) {
  for (; !stopping_; wait()) {
    const bool apart = fiber.sanitizer != nullptr;
    {
      std::optional<Unseen> unseen;
      if (apart) unseen.emplace();
      fiber.work();
      fiber.work = nullptr;
      fiber.sanitizer = nullptr;  // that CUDA thread has ended
      fiber.home->push_back(&fiber);
    }
    if (apart) return switch_fiber(scheduler_sanitizer_);
  }
}

void FiberPool::resume(Fiber& fiber) {
  running_ = &fiber;
  scheduler_sanitizer_ = this_fiber();
  if (fiber.sanitizer) switch_fiber(fiber.sanitizer);
  leaving_stack(&scheduler_fake_stack_, fiber.stack_bottom, fiber.stack_bytes);
  fiber.context = std::move(fiber.context).resume();
  entered_stack(scheduler_fake_stack_, nullptr, nullptr);
}

void FiberPool::wait() {
  Fiber& me = *running_;
  if (me.sanitizer) switch_fiber(scheduler_sanitizer_);
  leaving_stack(&me.fake_stack, scheduler_bottom_, scheduler_bytes_);
  scheduler_ = std::move(scheduler_).resume();
  entered_stack(me.fake_stack, &scheduler_bottom_, &scheduler_bytes_);
}

}  // namespace cuda_emu
