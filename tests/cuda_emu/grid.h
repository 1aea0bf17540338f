// One launch from inside: threads and their order (grid.cpp), barriers and exchanges of lanes (grid_exchanges.cpp),
// shared and global memory (grid_memory.cpp). Invariant: blocks run one after another, and one thread at a time runs,
// until it waits; after a fault no thread goes on. It does not say when a launch runs: the scheduler does.
#pragma once
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/cuda_emu/device_code.h"
#include "tests/cuda_emu/fibers.h"
#include "tests/cuda_emu/sanitizers.h"
#include "tests/cuda_emu/state.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace cuda_emu {

std::string text_of(Place place);

struct Abandoned {};  // unwinds a thread of a launch that cannot go on

using WarpValues = std::array<std::uint64_t, 32>;  // by lane
using WarpWork = void (*)(const WarpValues& values);
struct Exchange {  // of a warp; results of one stay readable while the next one fills
  std::array<WarpValues, 2> values{};
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
};

// An access of a warp: the instruction (of the host's program), which time a thread comes to it, and a sector.
using Touched = std::tuple<const void*, std::uint64_t, std::uint64_t>;

// A block's variable in shared memory, with nothing beside it. Under ThreadSanitizer unmapping forgets who touched it.
class SharedVariable {
 public:
  SharedVariable(const void* key, std::size_t bytes);
  ~SharedVariable();
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

class Grid {
 public:
  Grid(State& state, std::string name, dim3 grid, dim3 block, std::size_t shared_bytes, std::size_t shared_limit,
       const std::function<void()>& body)
      : state_(state),
        name_(std::move(name)),
        grid_(grid),
        block_(block),
        dynamic_bytes_(shared_bytes),
        shared_limit_(shared_limit),
        body_(body),
        counts_(state.ledger.kernels[name_]),
        threads_(std::size_t{block.x} * block.y * block.z),
        warps_((threads_.size() + 31) / 32) {}

  void run();
  bool block_barrier(Vote vote, bool mine, Place place);
  // work: of the lane that comes last, before any other goes on.
  unsigned exchange(unsigned mask, std::uint64_t mine, Place place, bool orders_memory, WarpWork work = nullptr);
  // What a whole warp does as one: work(each lane's `mine`).
  void as_one_warp(void* mine, WarpWork work, Place place);
  unsigned existing_lanes() const;  // of this thread's warp; the last one of a block may be a part
  std::uint64_t value_of(unsigned generation, int lane) const {
    return warps_[warp()].values[generation & 1][static_cast<std::size_t>(lane)];
  }
  void* shared_memory(const void* key, std::size_t bytes);
  void* dynamic_shared_memory();
  void check_shared(const void* data, std::size_t bytes, Place place);  // a pointer to shared memory, aligned
  void count_access(Access access, const void* data, std::size_t bytes, const void* instruction);

  // A finding, and the end of the launch.
  [[noreturn]] void fault(const std::string& text) {
    report(text);
    abandoned_ = true;
    throw Abandoned{};
  }
  static Grid& running();  // the launch that the calling device code belongs to
  bool threads_apart() const { return apart_; }
  void report(const std::string& text);

 private:
  enum Order { kSync, kStart, kEnd, kOrders };

  std::size_t warp() const { return static_cast<std::size_t>(this_thread->warp); }
  Thread& me() { return threads_[static_cast<std::size_t>(this_thread->linear)]; }
  void arrange(std::vector<std::size_t>& order);
  void begin_block(std::size_t number);
  void run_block(std::size_t number, const std::vector<std::size_t>& order);
  void run_threads(std::size_t block);
  void run_threads_from(std::size_t thread);
  void run_thread(std::size_t index);
  void end_thread(Thread& thread);
  void resume(Thread& thread);
  void wait_as(ThreadState as);
  void release_barrier();
  void describe_deadlock(std::size_t block);
  std::string fault_of(Access access, const void* data, std::size_t bytes) const;
  const SharedVariable* shared_at(const void* data) const;
  void count_sectors();

  State& state_;
  std::string name_;
  dim3 grid_, block_;
  std::size_t dynamic_bytes_, shared_limit_;
  const std::function<void()>& body_;
  KernelCounts& counts_;
  std::vector<Thread> threads_;
  std::vector<Exchange> warps_;
  std::vector<std::unique_ptr<SharedVariable>> shared_;
  std::vector<std::vector<Touched>> loaded_, stored_;                      // by warp
  std::vector<std::vector<std::pair<const void*, std::uint64_t>>> times_;  // by thread: it came to an instruction
  const std::vector<std::size_t>* order_ = nullptr;
  std::size_t next_ = 0;                                                // in *order_
  std::unique_ptr<char[]> orders_ = std::make_unique<char[]>(kOrders);  // of this launch alone
  bool abandoned_ = false;
  int begun_ = 0;       // blocks
  bool apart_ = false;  // every thread of this block is one of ThreadSanitizer's; others are their stream, in its order
  // The barrier.
  std::size_t live_ = 0, arrived_ = 0;
  unsigned generation_ = 0;
  Place barrier_place_{};
  bool any_ = false, all_ = true;
  std::array<bool, 2> any_result_{}, all_result_{};
};

// What device code calls. Where threads are their stream, what they do here is seen: ThreadSanitizer takes long to
// begin to ignore something where the calls of many waiting threads lie on one stack.
struct DeviceCall {
  DeviceCall() {
    if (grid.threads_apart()) unseen.emplace();
  }
  Grid& grid = Grid::running();
  std::optional<Unseen> unseen;
};

}  // namespace cuda_emu
