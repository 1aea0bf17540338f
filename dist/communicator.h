// Collectives between the ranks of a run. Public methods validate, count in the ledger, time and add error context,
// then call a private transport. Contributions are added in rank order 0..W-1 on every host backend, so `sim` and `mpi`
// give the same bits. Collectives are matched by the order in which each rank calls them; one thread per communicator.
// It does not know parameters, units or steps beyond the label it is given.
#pragma once
#include <chrono>
#include <csignal>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dist/ledger.h"
#include "tensor/device.h"
#include "tensor/recorder.h"

namespace regather {

// Another rank left: by an exception (code of the originator) or silently (PeerVanished).
class PeerFailed : public Error {
 public:
  PeerFailed(int rank, std::string reason, ExitCode code);
  int rank() const { return rank_; }
  const std::string& reason() const { return reason_; }

 private:
  int rank_;
  std::string reason_;
};

// What a collective is for. unit: ledger name ("block", "wte"); detail: for messages ("block 3").
struct Label {
  std::string_view unit;
  Pass pass;
  std::string_view detail{};
};

// A buffer of size() * shard elements; this rank's part begins at rank() * shard.
struct GatherBuffer {
  void* full;
  std::int64_t shard;  // elements per rank; may be 0
  DType dtype;
};

struct CommunicatorOptions {
  std::chrono::milliseconds timeout{60000};  // without any progress of a pending collective
  bool checked = false;  // before each collective, compare kind, size, type and label over the ranks
  std::int64_t chunk_bytes = std::int64_t{1} << 20;        // of a pairwise exchange
  std::int64_t max_message_bytes = std::int64_t{1} << 30;  // longer messages are split
  // Set by a signal handler. A collective that does not move after that calls `warn` once with the line that says where
  // every rank is, and goes on waiting: the others may only be finishing their step.
  const volatile std::sig_atomic_t* interrupt = nullptr;
  std::function<void(const std::string&)> warn{};
};

enum class TransferProgress;
class Transport;  // what a backend implements; dist/transport.h
class Peers;      // what is known of the other ranks; dist/peers.h

class Communicator {
 public:
  Communicator(int rank, int size, const CommunicatorOptions& options, std::unique_ptr<Transport> transport);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // In place, non-blocking; buffers stay untouched until the event. Several buffers are one ledger entry per element
  // type.
  Event all_gather(std::span<const GatherBuffer> buffers, const Label& label);
  // owned[0 .. shard) += (contribution of rank 0 + ... + rank W-1) [rank * shard ..]. full: [size * shard], kept until
  // the event; what is in it after that is undefined.
  Event reduce_scatter(float* full, float* owned, std::int64_t shard, const Label& label);
  // data[0 .. size * shard) = sum over ranks, in rank order, in place; the same bits on all ranks.
  Event all_reduce(float* data, std::int64_t shard, const Label& label);
  // Scalars, blocking: sum in rank order in double.
  void all_reduce(std::span<double> values, const Label& label);
  void barrier(const Label& label);
  // The memory of that collective is about to be given back, in a destructor, say, which cannot wait. Unless it has
  // ended, its communicator has failed from here on: what is in flight is moved on no more and can only be left. (What
  // a library was handed stays mapped until then: see leave().) True if it had not ended.
  static bool give_up(const Event& event) noexcept;
  // Blocking, not counted: start-up comparisons (hashes of configurations). Result in rank order.
  std::vector<std::string> exchange(const std::string& mine);
  // The same for one reader: the texts of all ranks on rank 0, nothing on the others.
  std::vector<std::string> collect(const std::string& mine);

  // Tells the other ranks that this one leaves, and waits until they have said so too (at most 5 s), so that no
  // launcher ends a rank that has not yet said why. Never throws. After it, the communicator can only be destroyed;
  // memory that collectives were given stays mapped until then.
  void leave(std::string_view reason, ExitCode code) noexcept;
  // Drives pending collectives and answers other ranks; cheap. For Device::between_ops. A host that enqueues work for a
  // device is held back when it is too far ahead of a collective: a driver that takes no more work would block it.
  void progress();

  const Ledger& ledger() const { return ledger_; }
  void reset_ledger() { ledger_.reset(); }
  // Records the time in each collective, and its flight; null: off. A flight that began without one is not recorded.
  void set_recorder(Recorder* recorder) { recorder_ = recorder; }
  // Collectives (but those of scalars) move this device's memory from now on, and the host waits for the device as it
  // waits for other ranks. Collective. Throws UsageError if the backend cannot. Without it: the host's memory.
  // On a GPU gathers run in the order of Stream::Gather and reductions in that of Stream::Reduce, which the caller has
  // made to wait for what writes and reads the buffers; a stream that waits for the event needs no host.
  void use_memory_of(Device& device);
  // Where this rank is, for messages of failures: "step 120".
  void set_where(std::string where) { where_ = std::move(where); }
  const std::string& where() const { return where_; }
  std::int64_t staging_bytes() const;  // memory of the backend, outside the allocator's counts

 private:
  class InFlight;
  struct Started;
  using Flight = std::shared_ptr<InFlight>;

  Started describe(Collective collective, const Label& label, DType dtype, std::string_view sizes,
                   std::int64_t wire_bytes) const;
  template <class Begin>
  Flight start(const Started& started, Begin begin);
  void finish(InFlight& flight);
  void landed(InFlight& flight);
  TransferProgress drive(const InFlight* awaited);
  void fail(const Error& error) noexcept;
  void wait_for_device(const std::function<bool()>& done);
  void compare(std::int64_t sequence, const std::string& text);
  template <class F>
  void guarded(const std::string& what, F f);

  int rank_, size_;
  CommunicatorOptions options_;
  Ledger ledger_;
  Recorder* recorder_ = nullptr;
  std::string where_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Peers> peers_;
  std::deque<Flight> pending_;  // in the order of their start
  std::int64_t sequence_ = 0, exchanges_ = 0;
  std::optional<Error> failure_;  // the first; nothing works after it
  std::chrono::steady_clock::time_point listened_{};
  int operations_ahead_ = 0;  // since a collective has ended
  std::shared_ptr<const Device::Waiter> waiter_;
};

// sim: ranks are threads of this process. Calls body(communicator) on `ranks` threads and rethrows the originating
// error.
struct SimOptions : CommunicatorOptions {
  std::chrono::microseconds delay{0};  // added to each collective
  // What moves the data, over the transport of a rank's thread. For tests of what needs another for its messages.
  std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>, int rank, int size)> over{};
};
void run_ranks(int ranks, const SimOptions& options, const std::function<void(Communicator&)>& body);

// mpi: initialises MPI at first use (thread level FUNNELED, refused if less) and finalises it with the last
// communicator. Throws UsageError in a build without MPI.
std::unique_ptr<Communicator> make_mpi_communicator(const CommunicatorOptions& options);
// nccl, staged: processes as with mpi, whose messages they use; collectives move the memory of a GPU each (nccl), or of
// GPUs that ranks may share, through the host's (staged). Throw UsageError in a build without CUDA.
std::unique_ptr<Communicator> make_nccl_communicator(const CommunicatorOptions& options);
std::unique_ptr<Communicator> make_staged_communicator(const CommunicatorOptions& options);
// One rank, no library: collectives are copies.
std::unique_ptr<Communicator> make_single_communicator(const CommunicatorOptions& options);
// As rank `rank` of `size`, alone: collectives are counted and move nothing. For runs on a meta device.
std::unique_ptr<Communicator> make_dry_communicator(int rank, int size);

}  // namespace regather
