// Devices without hardware: what a test holds. While a Machine lives, the symbols of the CUDA runtime, cuBLAS and NCCL
// that this library defines act on it. Nothing runs when it is enqueued: when a host waits, a seeded scheduler runs any
// legal next piece of work of any stream. Invariant: host threads (ranks) take turns, so one seed replays one
// interleaving exactly. What a program does wrong is a finding: a sentence that a test reads. It cannot show speed,
// occupancy, or what the memory model of a real device allows beyond other orders of execution.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace cuda_emu {

enum class ThreadOrder { Forward, Reverse, Random };  // of blocks, and of the threads in a block

struct Options {
  std::uint64_t seed = 1;
  int devices = 8;
  std::size_t capacity = std::size_t{256} << 20;  // of each device
  ThreadOrder order = ThreadOrder::Forward;
  int blocks_apart =
      2;  // of a launch: their threads are told apart by ThreadSanitizer, at 1 ms each; others are their stream
  bool guarded = true;  // a host that follows a device pointer dies at once; costs system calls with every task
  std::int64_t most_vain_polls = 100'000;  // of a host while nothing runs; then that is called a deadlock
  // NCCL's calls return before they have enqueued anything, as they may: what they have started, polls go on with.
  bool late_collectives = false;
};

// What one kernel did, over all its launches. Bytes are those that its loads and stores were asked for (an atomic is
// both); sectors are the pieces of 32 bytes that a warp's accesses touch, as the hardware moves them: bytes / 32 where
// all is coalesced and aligned.
struct KernelCounts {
  std::int64_t launches = 0, loaded = 0, stored = 0, loaded_sectors = 0, stored_sectors = 0;
};
struct Counts {
  std::int64_t calls = 0, bytes = 0;
};
struct Ledger {
  std::map<std::string, KernelCounts> kernels;
  std::map<std::string, Counts> copies;  // "host to device", "device to device", "device to host", "set"
  // By NCCL's name and the element type, "AllGather of fp32"; bytes that a ring sends, summed over ranks.
  std::map<std::string, Counts> collectives;
  Counts products;  // cuBLAS; bytes of the three matrices
  Counts allocations;
};

struct State;

class Machine {
 public:
  explicit Machine(const Options& options = {});
  ~Machine();  // runs what is still enqueued
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  const std::vector<std::string>& findings() const;
  std::vector<std::string> take_findings();
  Ledger& ledger();
  std::size_t used_bytes(int device) const;
  std::size_t peak_bytes(int device) const;
  std::size_t pinned_bytes() const;
  int communicators() const;       // of NCCL that are neither destroyed nor aborted
  int communicators_made() const;  // so far

  // The n-th collective (from 0) of this rank of a communicator ends with ncclRemoteError, as when a peer is gone.
  void fail_collective(int rank, std::int64_t n);
  // The n-th kernel (from 0) that this rank launches from here on reads what it may not. Its context has failed when
  // that runs: nothing of it runs any more, and every call of that rank returns cudaErrorIllegalAddress.
  void fail_kernel(int rank, std::int64_t n);

  // Runs body(rank) on so many threads that take turns. Exceptions leave by rethrowing the first.
  void run_ranks(int ranks, const std::function<void(int)>& body);

 private:
  friend class Rank;
  std::unique_ptr<State> state_;
};

// Makes the calling thread the host of a rank, on device `rank`, until the end of its scope. Threads wait here until
// all ranks have come; from then on one runs at a time. For programs that start their own threads.
class Rank {
 public:
  Rank(Machine& machine, int rank, int ranks);
  ~Rank();  // waits for the device's streams
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

 private:
  State& state_;
};

// For a loop of the host that polls something else than CUDA: lets devices and other ranks go on.
void yield();

}  // namespace cuda_emu
