// The machine from inside: what the C functions (runtime.cpp, blas.cpp, collectives.cpp) and the kernels' threads act
// on. Every member is touched by one thread at a time: the one whose turn it is.
#pragma once
#include <driver_types.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <random>
#include <utility>

#include "tests/cuda_emu/machine.h"

namespace cuda_emu {

// Bytes of shared memory of a block: without asking, and what a launch may ask for on sm_80, the smallest of the GPUs
// that are built for.
constexpr std::size_t kStaticShared = 48 << 10, kMostShared = 163 << 10;

class Meetings;   // of NCCL's communicators; collectives.cpp
class FiberPool;  // stacks for the threads of kernels; grid.cpp

// One thing in a stream. ready: what it waits for, besides those before it.
struct Task {
  std::uint64_t sequence;
  std::string name;
  std::function<void()> run;
  std::function<bool()> ready;
  std::shared_ptr<char> enqueued;  // carries the order between enqueueing and running
};

// Of an event. Waits are for the latest of when they are called, whatever the event is recorded for later.
struct Record {
  bool done = false;
};

// What a process has on its devices. Where it failed, everything in it has, for good.
struct Context {
  bool failed = false;
};

}  // namespace cuda_emu

struct CUstream_st {
  int device, number;
  std::shared_ptr<cuda_emu::Context> context;
  std::deque<cuda_emu::Task> tasks;
  std::uint64_t last = 0, done = 0;  // sequence numbers
  std::uint64_t priority = 0;
  void* fiber = nullptr;
  bool destroyed = false;  // it takes nothing more; what it has still runs
};
struct CUevent_st {
  std::shared_ptr<cuda_emu::Record> latest;  // none: nothing to wait for
  bool destroyed = false;                    // streams may still come to its records

  bool done() const { return !latest || latest->done; }
};

namespace cuda_emu {

// A device's memory: one range of addresses that are never given out twice, so that every stale pointer is recognised.
// Between tasks a guarded range is inaccessible: a host that follows a device pointer dies at once.
class DeviceMemory {
 public:
  // Of a block, from its begin, are filled, and said to ThreadSanitizer when it is taken or given back. All of a large
  // one would cost more time than it tells.
  static constexpr std::size_t kMostFilled = std::size_t{1} << 20;

  DeviceMemory(std::size_t capacity, bool guarded);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* allocate(std::size_t bytes);  // null: no room. Contents are undefined until fill()
  void fill(void* data);              // with NaNs
  // What is wrong with it; empty: nothing.
  std::string release(void* data);
  std::string find_fault(const void* data, std::size_t bytes) const;
  bool contains(const void* data) const;
  std::size_t size_of(const void* data) const;  // of the live block that begins there; 0: there is none
  void open();
  void close();

  const std::size_t capacity;
  std::size_t used = 0, peak = 0;

 private:
  struct Block {
    std::size_t bytes;
    bool live;
    std::int64_t number;
  };
  const std::pair<const char* const, Block>* block_at(const void* data) const;

  const bool guarded_;
  char* begin_;
  std::size_t top_ = 0;
  int openings_ = 0;
  std::map<const char*, Block> blocks_;
};

// A thread of the program. ready: what it waits for; empty when it runs.
struct Host {
  int rank = 0, device = 0;
  std::function<bool()> ready;
  std::string waits_in;
  bool finished = false;
  std::condition_variable turn;
  cudaError_t last_error = cudaSuccess;
  std::shared_ptr<Context> context = std::make_shared<Context>();
  int group_depth = 0;                          // of ncclGroupStart
  std::vector<std::function<void()>> in_group;  // posted by ncclGroupEnd
  bool launches_late = false;                   // in this group, which ncclGroupEnd leaves in progress
};

struct State {
  explicit State(const Options& options);
  ~State();

  Options options;
  std::mt19937_64 random;
  std::vector<std::string> findings;
  Ledger ledger;
  std::vector<std::unique_ptr<DeviceMemory>> devices;
  std::map<const char*, std::size_t> pinned;                 // what is left in the end goes with the machine
  std::map<const void*, std::size_t> dynamic_shared_limits;  // of kernels for which one was set
  std::unique_ptr<FiberPool> fibers;
  std::unique_ptr<Meetings> meetings;
  std::optional<std::pair<int, std::int64_t>> failing_collective, failing_kernel;
  std::vector<std::unique_ptr<CUevent_st>> events;        // all that there ever were: a stale handle
  std::vector<std::unique_ptr<CUstream_st>> all_streams;  // is recognised, and leaks nothing
  int communicators = 0, communicators_made = 0;

  void report(std::string finding) { findings.push_back(std::move(finding)); }
  std::uint64_t draw(std::uint64_t below) { return random() % below; }

  // Memory. find_fault: empty if these bytes are all in one live allocation, or on the host. check: reports it.
  std::string find_fault(const void* data, std::size_t bytes) const;
  bool on_device(const void* data) const;
  bool is_pinned(const void* data) const;
  bool check(const void* data, std::size_t bytes, const std::string& who);

  // Streams and time.
  void enqueue(cudaStream_t stream, std::string name, std::function<void()> run, std::function<bool()> ready = {});
  void destroy(CUstream_st& stream);  // when its tasks have run
  void fail(Context& context);
  bool step();                                                                  // runs one task; false: none can run
  bool wait_until(const std::function<bool()>& ready, const std::string& who);  // false: it never will (a finding)
  void let_others_go_on();
  bool poll(const std::string& who);  // lets others go on; false: that has been in vain too often (a finding)
  Host& host();
  void hand_over(Host& to);
  std::vector<Host*> runnable_hosts();
  void join(int rank, int ranks);
  void leave();

  std::vector<CUstream_st*> streams;  // those that still run something, or may
  std::uint64_t sequence = 0;
  int next_stream = 0;
  std::int64_t vain_polls = 0;  // since anything was enqueued or ran
  bool dead = false;            // after a deadlock nothing waits any more

 private:
  CUstream_st* pick();
  void run_task(CUstream_st& stream);
  void retire(CUstream_st& stream);
  void give_up(const std::string& who);

  Host main_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Host>> hosts_;  // of the latest run; none is removed while any of them runs
  Host* running_ = nullptr;
};

State& state();  // of the living machine

}  // namespace cuda_emu
