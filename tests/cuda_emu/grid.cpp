// One launch: blocks one after another, every CUDA thread a fiber (fibers.h). A thread runs until it waits at a barrier
// or in a warp's exchange; when nobody can run, what they wait for is a finding and the launch is abandoned.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "tests/cuda_emu/device_code.h"
#include "tests/cuda_emu/fibers.h"
#include "tests/cuda_emu/sanitizers.h"
#include "tests/cuda_emu/state.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

#include <sys/mman.h>

namespace cuda_emu {

ThreadContext* this_thread = nullptr;

namespace {

constexpr std::size_t kSector = 32, kStaticShared = 48 << 10, kMostShared = 227 << 10;
constexpr unsigned kMostThreads = 1024;

struct Abandoned {};  // unwinds a thread of a launch that cannot go on

std::string text_of(Place place) {
  const std::string_view file = place.file;
  return fmt::format("{}:{}", file.substr(file.rfind('/') + 1), place.line);
}
bool same(Place a, Place b) { return a.line == b.line && std::string_view(a.file) == b.file; }

struct Exchange {  // of a warp; results of one stay readable while the next one fills
  std::array<std::array<std::uint64_t, 32>, 2> values{};
  std::array<Place, 2> places{};
  unsigned arrived = 0, mask = 0, generation = 0;
  std::unique_ptr<char> order = std::make_unique<char>();
};

enum class ThreadState : std::uint8_t { New, Ready, AtBarrier, InExchange, Done };

struct Thread {
  ThreadContext context{};
  ThreadState state = ThreadState::New;
  FiberPool::Fiber* fiber = nullptr;
  void* sanitizer = nullptr;
  std::uint64_t loads = 0, stores = 0;
};

// A block's variable in shared memory, with nothing beside it. Under ThreadSanitizer unmapping forgets who touched it.
class SharedVariable {
 public:
  SharedVariable(const void* key, std::size_t bytes) : key_(key), bytes_(bytes) {
    data_ = kThreadSanitizer
                ? static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))
                : new char[bytes];
    std::fill_n(data_, bytes, '\xff');
    release(data_);
  }
  ~SharedVariable() {
    if (kThreadSanitizer)
      munmap(data_, bytes_);
    else
      delete[] data_;
  }
  SharedVariable(const SharedVariable&) = delete;
  SharedVariable& operator=(const SharedVariable&) = delete;
  const void* key() const { return key_; }
  std::size_t bytes() const { return bytes_; }
  char* data() const { return data_; }

 private:
  const void* key_;
  std::size_t bytes_;
  char* data_;
};

class Grid;
Grid* running = nullptr;

class Grid {
 public:
  Grid(State& state, std::string name, dim3 grid, dim3 block, std::size_t shared_bytes,
       const std::function<void()>& body)
      : state_(state),
        name_(std::move(name)),
        grid_(grid),
        block_(block),
        dynamic_bytes_(shared_bytes),
        body_(body),
        counts_(state.ledger.kernels[name_]),
        threads_(std::size_t{block.x} * block.y * block.z),
        warps_((threads_.size() + 31) / 32) {}

  void run() {
    running = this;
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
    running = nullptr;
  }

  bool block_barrier(Vote vote, bool mine, Place place);
  unsigned exchange(unsigned mask, std::uint64_t mine, Place place, bool orders_memory);
  std::uint64_t value_of(unsigned generation, int lane) const {
    return warps_[warp()].values[generation & 1][static_cast<std::size_t>(lane)];
  }
  void* shared_memory(const void* key, std::size_t bytes);
  void* dynamic_shared_memory() {
    if (dynamic_bytes_ == 0) fault("it asks for dynamic shared memory and was launched without");
    return shared_memory(this, dynamic_bytes_);
  }
  void count_access(Access access, const void* data, std::size_t bytes);

  // A finding, and the end of the launch.
  [[noreturn]] void fault(const std::string& text) {
    report(text);
    abandoned_ = true;
    throw Abandoned{};
  }
  void report(const std::string& text) { state_.report(fmt::format("kernel {}: {}", name_, text)); }

 private:
  enum Order { kSync, kStart, kEnd, kOrders };

  std::size_t warp() const { return static_cast<std::size_t>(this_thread->warp); }
  Thread& me() { return threads_[static_cast<std::size_t>(this_thread->linear)]; }
  void arrange(std::vector<std::size_t>& order) {
    if (state_.options.order == ThreadOrder::Reverse) std::reverse(order.begin(), order.end());
    if (state_.options.order == ThreadOrder::Random) std::shuffle(order.begin(), order.end(), state_.random);
  }
  void begin_block(std::size_t number);
  void run_block(std::size_t number, const std::vector<std::size_t>& order);
  void run_threads_from(std::size_t thread);
  void run_thread(std::size_t index);
  void end_thread(Thread& thread);
  void resume(Thread& thread);
  void wait_as(ThreadState as);
  void release_barrier();
  void describe_deadlock(std::size_t block);
  std::string fault_of(const void* data, std::size_t bytes) const;
  void count_sectors();

  State& state_;
  std::string name_;
  dim3 grid_, block_;
  std::size_t dynamic_bytes_;
  const std::function<void()>& body_;
  KernelCounts& counts_;
  std::vector<Thread> threads_;
  std::vector<Exchange> warps_;
  std::vector<std::unique_ptr<SharedVariable>> shared_;
  std::vector<std::vector<std::uint64_t>> loaded_, stored_;  // by warp: (number of the access, sector)
  const std::vector<std::size_t>* order_ = nullptr;
  std::size_t next_ = 0;                                                // in *order_
  std::unique_ptr<char[]> orders_ = std::make_unique<char[]>(kOrders);  // of this launch alone
  bool abandoned_ = false;
  // The barrier.
  std::size_t live_ = 0, arrived_ = 0;
  unsigned generation_ = 0;
  Place barrier_place_{};
  bool any_ = false, all_ = true;
  std::array<bool, 2> any_result_{}, all_result_{};
};

// ---- threads --------------------------------------------------------------------------------------------------------

void Grid::begin_block(std::size_t number) {
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
    threads_[t].sanitizer = new_fiber();
  }
  warps_.clear();
  warps_.resize((threads_.size() + 31) / 32);
  loaded_.assign(warps_.size(), {});
  stored_.assign(warps_.size(), {});
  shared_.clear();
  live_ = threads_.size();
  arrived_ = 0;
  next_ = 0;
}

void Grid::run_block(std::size_t number, const std::vector<std::size_t>& order) {
  begin_block(number);
  order_ = &order;
  release(&orders_[kStart]);
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
    if (live_ > 0 && arrived_ == live_) {  // the others have ended
      report(fmt::format("{} of {} threads ended before the __syncthreads at {}", threads_.size() - live_,
                         threads_.size(), text_of(barrier_place_)));
      release_barrier();
      moved = true;
    }
    if (moved) continue;
    if (!abandoned_) describe_deadlock(number);
    abandoned_ = true;
    for (Thread& thread : threads_)
      if (thread.state == ThreadState::AtBarrier || thread.state == ThreadState::InExchange) resume(thread);
  }
  count_sectors();
  shared_.clear();
  for (Thread& thread : threads_) delete_fiber(thread.sanitizer);
}

// Under ThreadSanitizer every CUDA thread is a fiber of its own; elsewhere those that never wait share one.
void Grid::run_threads_from(std::size_t index) {
  run_thread(index);
  while (!kThreadSanitizer && next_ < order_->size()) {
    const std::size_t t = (*order_)[next_++];
    threads_[t].fiber = threads_[index].fiber;
    run_thread(t);
  }
}

void Grid::run_thread(std::size_t index) {
  Thread& thread = threads_[index];
  this_thread = &thread.context;
  thread.state = ThreadState::Ready;
  acquire(&orders_[kStart]);
  try {
    if (!abandoned_) body_();
  } catch (const Abandoned&) {
  }
  release(&orders_[kEnd]);
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

// ---- barriers and exchanges -----------------------------------------------------------------------------------------

void Grid::release_barrier() {
  any_result_[generation_ & 1] = any_;
  all_result_[generation_ & 1] = all_;
  arrived_ = 0;
  ++generation_;
  for (Thread& t : threads_)
    if (t.state == ThreadState::AtBarrier) t.state = ThreadState::Ready;
}

bool Grid::block_barrier(Vote vote, bool mine, Place place) {
  if (arrived_++ == 0) {
    barrier_place_ = place;
    any_ = false;
    all_ = true;
  } else if (!same(place, barrier_place_)) {
    fault(fmt::format("threads of one block are at different barriers: {} and {}", text_of(barrier_place_),
                      text_of(place)));
  }
  any_ = any_ || mine;
  all_ = all_ && mine;
  cuda_emu::release(&orders_[kSync]);
  const unsigned now = generation_;
  if (arrived_ == threads_.size())
    release_barrier();
  else
    while (generation_ == now) wait_as(ThreadState::AtBarrier);
  acquire(&orders_[kSync]);
  return vote == Vote::Any ? any_result_[now & 1] : vote == Vote::All ? all_result_[now & 1] : false;
}

// Waits for the lanes of the mask; returns which exchange it was. Only __syncwarp orders memory: a shuffle does not.
unsigned Grid::exchange(unsigned mask, std::uint64_t mine, Place place, bool orders_memory) {
  Exchange& warp_exchange = warps_[warp()];
  const int lane = this_thread->lane;
  const unsigned now = warp_exchange.generation;
  if ((mask >> lane & 1U) == 0)
    fault(fmt::format("lane {} is not in its own mask {:08x} at {}", lane, mask, text_of(place)));
  if (warp_exchange.arrived == 0) {
    warp_exchange.mask = mask;
    warp_exchange.places[now & 1] = place;
  } else if (warp_exchange.mask != mask || !same(warp_exchange.places[now & 1], place)) {
    fault(fmt::format("lanes of one warp exchange at different places: {} (mask {:08x}) and {} (mask {:08x})",
                      text_of(warp_exchange.places[now & 1]), warp_exchange.mask, text_of(place), mask));
  }
  warp_exchange.values[now & 1][static_cast<std::size_t>(lane)] = mine;
  warp_exchange.arrived |= 1U << lane;
  if (orders_memory) cuda_emu::release(warp_exchange.order.get());
  const std::size_t first = warp() * 32, count = std::min<std::size_t>(32, threads_.size() - first);
  const unsigned existing = count == 32 ? ~0U : (1U << count) - 1;
  if (warp_exchange.arrived == (mask & existing)) {
    warp_exchange.arrived = 0;
    ++warp_exchange.generation;
    for (std::size_t t = first; t < first + count; ++t)
      if (threads_[t].state == ThreadState::InExchange) threads_[t].state = ThreadState::Ready;
  } else {
    while (warp_exchange.generation == now) wait_as(ThreadState::InExchange);
  }
  if (orders_memory) acquire(warp_exchange.order.get());
  return now;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

void* Grid::shared_memory(const void* key, std::size_t bytes) {
  std::size_t total = bytes;
  for (const auto& variable : shared_) {
    if (variable->key() == key) {
      acquire(variable->data());
      return variable->data();
    }
    if (variable->key() != this) total += variable->bytes();
  }
  if (key != this && total > kStaticShared)
    fault(fmt::format("{} bytes of static shared memory; a block has {}", total, kStaticShared));
  return shared_.emplace_back(std::make_unique<SharedVariable>(key, bytes))->data();
}

std::string Grid::fault_of(const void* data, std::size_t bytes) const {
  if (reinterpret_cast<std::uintptr_t>(data) % bytes != 0)
    return fmt::format("misaligned: {} bytes at an address that is no multiple of it", bytes);
  return state_.on_device(data) ? state_.find_fault(data, bytes) : "a pointer of the host";
}

void Grid::count_access(Access access, const void* data, std::size_t bytes) {
  const bool loads = access == Access::Load;
  if (const std::string wrong = fault_of(data, bytes); !wrong.empty())
    fault(fmt::format("{} in block ({}, {}, {}), thread {}: {}", loads ? "load" : "store", this_thread->block.x,
                      this_thread->block.y, this_thread->block.z, this_thread->linear, wrong));
  Thread& thread = me();
  (loads ? counts_.loaded : counts_.stored) += static_cast<std::int64_t>(bytes);
  const std::uint64_t number = loads ? thread.loads++ : thread.stores++;
  auto& sectors = (loads ? loaded_ : stored_)[warp()];
  const std::uint64_t first = reinterpret_cast<std::uintptr_t>(data) / kSector,
                      last = (reinterpret_cast<std::uintptr_t>(data) + bytes - 1) / kSector;
  for (std::uint64_t s = first; s <= last; ++s) sectors.push_back(number << 44 | s);
}

// Lanes that touch one sector in the same access move it once.
void Grid::count_sectors() {
  const auto distinct = [](std::vector<std::vector<std::uint64_t>>& warps) {
    std::int64_t n = 0;
    for (auto& sectors : warps) {
      std::sort(sectors.begin(), sectors.end());
      n += std::unique(sectors.begin(), sectors.end()) - sectors.begin();
    }
    return n;
  };
  counts_.loaded_sectors += distinct(loaded_);
  counts_.stored_sectors += distinct(stored_);
}

}  // namespace

// ---- what device code calls -----------------------------------------------------------------------------------------

bool block_barrier(Vote vote, bool mine, Place place) { return running->block_barrier(vote, mine, place); }
void warp_barrier(unsigned mask, Place place) { running->exchange(mask, 0, place, true); }
std::uint64_t warp_read(unsigned mask, std::uint64_t mine, int lane, Place place) {
  const unsigned now = running->exchange(mask, mine, place, false);
  if (lane < 0 || lane > 31 || (mask >> lane & 1U) == 0)
    running->fault(
        fmt::format("a shuffle reads lane {}, which is not in its mask {:08x}, at {}", lane, mask, text_of(place)));
  return running->value_of(now, lane);
}
unsigned warp_ballot(unsigned mask, bool mine, Place place) {
  const unsigned now = running->exchange(mask, mine ? 1 : 0, place, false);
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane)
    if ((mask >> lane & 1U) != 0 && running->value_of(now, lane) != 0) votes |= 1U << lane;
  return votes;
}
void count_access(Access access, const void* data, std::size_t bytes) { running->count_access(access, data, bytes); }
void* shared_memory(const void* key, std::size_t bytes) { return running->shared_memory(key, bytes); }
void* dynamic_shared_memory() { return running->dynamic_shared_memory(); }

void launch_kernel(const char* name, const void* kernel, dim3 grid, dim3 block, std::size_t shared_bytes,
                   cudaStream_t stream, std::function<void()> body) {
  State& s = state();
  const std::size_t threads = std::size_t{block.x} * block.y * block.z;
  const bool fits = threads >= 1 && threads <= kMostThreads && block.z <= 64 && grid.x >= 1 && grid.x < (1U << 31) &&
                    grid.y >= 1 && grid.y < 65536 && grid.z >= 1 && grid.z < 65536 && shared_bytes <= kMostShared &&
                    (shared_bytes <= kStaticShared || s.large_shared.contains(kernel));
  if (!fits) {
    s.host().last_error = cudaErrorInvalidConfiguration;
    return;
  }
  s.enqueue(stream, std::string("kernel ") + name,
            [&s, name = std::string(name), grid, block, shared_bytes, body = std::move(body)] {
              Grid(s, name, grid, block, shared_bytes, body).run();
            });
}

}  // namespace cuda_emu
