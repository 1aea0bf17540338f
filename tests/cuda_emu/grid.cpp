// One launch: blocks one after another, every CUDA thread a fiber (fibers.h). A thread runs until it waits at a barrier
// or in a warp's exchange; when nobody can run, what they wait for is a finding and the launch is abandoned.
#include "tests/cuda_emu/grid.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "tests/cuda_emu/sanitizers.h"

namespace cuda_emu {

ThreadContext* this_thread = nullptr;

namespace {
Grid* running_grid = nullptr;  // device code has no handle that could lead to it
}  // namespace

Grid& Grid::running() { return *running_grid; }

void Grid::run() {
  running_grid = this;
  ++counts_.launches;
  std::vector<std::size_t> blocks(std::size_t{grid_.x} * grid_.y * grid_.z), threads(threads_.size());
  std::iota(blocks.begin(), blocks.end(), 0U);
  std::iota(threads.begin(), threads.end(), 0U);
  arrange(blocks);
  for (std::size_t b : blocks) {
    arrange(threads);
    run_block(b, threads);
    if (abandoned_) break;
  }
  acquire(&orders_[kEnd]);
  this_thread = nullptr;
  running_grid = nullptr;
}

void Grid::report(const std::string& text) {
  const Unseen unseen;
  state_.report(fmt::format("kernel {}: {}", name_, text));
}

void Grid::arrange(std::vector<std::size_t>& order) {
  if (state_.options.order == ThreadOrder::Reverse) std::reverse(order.begin(), order.end());
  if (state_.options.order == ThreadOrder::Random) std::shuffle(order.begin(), order.end(), state_.random);
}

void Grid::begin_block(std::size_t number) {
  apart_ = kThreadSanitizer && begun_++ < state_.options.blocks_apart;
  const uint3 block{static_cast<unsigned>(number % grid_.x), static_cast<unsigned>(number / grid_.x % grid_.y),
                    static_cast<unsigned>(number / grid_.x / grid_.y)};
  for (std::size_t t = 0; t < threads_.size(); ++t) {
    const auto i = static_cast<unsigned>(t);
    threads_[t] = {};
    threads_[t].context = {{i % block_.x, i / block_.x % block_.y, i / block_.x / block_.y},
                           block,
                           block_,
                           grid_,
                           static_cast<int>(t),
                           static_cast<int>(t % 32),
                           static_cast<int>(t / 32)};
    if (apart_) threads_[t].sanitizer = new_fiber();
  }
  warps_.clear();
  warps_.resize((threads_.size() + 31) / 32);
  loaded_.assign(warps_.size(), {});
  stored_.assign(warps_.size(), {});
  times_.resize(threads_.size());
  for (auto& times : times_) times.clear();
  shared_.clear();
  live_ = threads_.size();
  arrived_ = 0;
  next_ = 0;
}

void Grid::run_block(std::size_t number, const std::vector<std::size_t>& order) {
  begin_block(number);
  order_ = &order;
  if (apart_) release(&orders_[kStart]);
  run_threads(number);
  count_sectors();
  shared_.clear();
  for (Thread& thread : threads_)
    if (apart_) delete_fiber(thread.sanitizer);
}

void Grid::run_threads(std::size_t block) {
  std::optional<Seen> seen;
  if (!apart_) seen.emplace();
  const std::vector<std::size_t>& order = *order_;
  while (live_ > 0) {
    bool moved = false;
    while (next_ < order.size()) {
      FiberPool::Fiber& fiber = state_.fibers->idle_fiber();
      Thread& thread = threads_[order[next_]];
      const std::size_t first = order[next_++];
      fiber.work = [this, first] { run_threads_from(first); };
      thread.fiber = &fiber;
      resume(thread);
      moved = true;
    }
    for (std::size_t t : order)
      if (threads_[t].state == ThreadState::Ready) {
        resume(threads_[t]);
        moved = true;
      }
    if (live_ > 0 && arrived_ == live_ && !abandoned_) {  // the others have ended
      report(fmt::format("{} of {} threads ended before the __syncthreads at {}", threads_.size() - live_,
                         threads_.size(), text_of(barrier_place_)));
      release_barrier();
      moved = true;
    }
    if (moved) continue;
    if (!abandoned_) describe_deadlock(block);
    abandoned_ = true;
    for (Thread& thread : threads_)
      if (thread.state == ThreadState::AtBarrier || thread.state == ThreadState::InExchange) resume(thread);
  }
}

// Where ThreadSanitizer tells CUDA threads apart each is a fiber of its own; elsewhere those that never wait share one.
void Grid::run_threads_from(std::size_t index) {
  run_thread(index);
  while (!apart_ && next_ < order_->size()) {
    const std::size_t t = (*order_)[next_++];
    threads_[t].fiber = threads_[index].fiber;
    run_thread(t);
  }
}

void Grid::run_thread(std::size_t index) {
  Thread& thread = threads_[index];
  this_thread = &thread.context;
  thread.state = ThreadState::Ready;
  if (apart_) acquire(&orders_[kStart]);
  try {
    std::optional<Seen> seen;
    if (apart_) seen.emplace();
    if (!abandoned_) body_();
  } catch (const Abandoned&) {
  }
  if (apart_) release(&orders_[kEnd]);
  thread.state = ThreadState::Done;
  --live_;
}

void Grid::resume(Thread& thread) {
  this_thread = &thread.context;
  thread.fiber->sanitizer = thread.sanitizer;
  state_.fibers->resume(*thread.fiber);
}

void Grid::wait_as(ThreadState as) {
  Thread& thread = me();
  thread.state = as;
  state_.fibers->wait();
  this_thread = &thread.context;
  if (abandoned_) throw Abandoned{};
}

void Grid::describe_deadlock(std::size_t block) {
  std::size_t at_barrier = 0, in_exchange = 0;
  for (const Thread& t : threads_) {
    at_barrier += t.state == ThreadState::AtBarrier;
    in_exchange += t.state == ThreadState::InExchange;
  }
  std::string text =
      fmt::format("deadlock in block {}: of {} threads {} wait at __syncthreads", block, threads_.size(), at_barrier);
  if (at_barrier > 0) text += " at " + text_of(barrier_place_);
  text += fmt::format(", {} for other lanes, {} have ended", in_exchange, threads_.size() - live_);
  for (std::size_t w = 0; w < warps_.size(); ++w)
    if (warps_[w].arrived != 0)
      text += fmt::format("; warp {} at {}: mask {:08x}, arrived {:08x}", w,
                          text_of(warps_[w].places[warps_[w].generation & 1]), warps_[w].mask, warps_[w].arrived);
  report(text);
}

void launch_kernel(const char* name, const void* kernel, dim3 grid, dim3 block, std::size_t shared_bytes,
                   cudaStream_t stream, std::function<void()> body) {
  State& s = state();
  const std::size_t threads = std::size_t{block.x} * block.y * block.z;
  constexpr unsigned kMostThreads = 1024;
  const bool fits = threads >= 1 && threads <= kMostThreads && block.z <= 64 && grid.x >= 1 && grid.x < (1U << 31) &&
                    grid.y >= 1 && grid.y < 65536 && grid.z >= 1 && grid.z < 65536;
  const auto asked = s.dynamic_shared_limits.find(kernel);
  const std::size_t dynamic_limit = asked == s.dynamic_shared_limits.end() ? kStaticShared : asked->second;
  if (!fits || shared_bytes > dynamic_limit) {
    s.host().last_error = fits ? cudaErrorInvalidValue : cudaErrorInvalidConfiguration;
    return;
  }
  const std::size_t limit = dynamic_limit > kStaticShared ? kMostShared : kStaticShared;
  const bool fails = s.failing_kernel && s.failing_kernel->first == s.host().rank && s.failing_kernel->second-- == 0;
  s.enqueue(stream, std::string("kernel ") + name,
            [&s, stream, fails, name = std::string(name), grid, block, shared_bytes, limit, body = std::move(body)] {
              if (fails) return s.fail(*stream->context);
              Grid(s, name, grid, block, shared_bytes, limit, body).run();
            });
}

}  // namespace cuda_emu
