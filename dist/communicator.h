// Collectives between the ranks of a run. Public methods validate, count in the ledger, time and add error context, then call
// a private transport. Contributions are added in rank order 0..W-1 on every host backend, so `sim` and `mpi` give the same
// bits. Collectives are matched by the order in which each rank calls them; one thread per communicator.
// It does not know parameters, units or steps beyond the label it is given.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dist/ledger.h"
#include "tensor/device.h"

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
  bool checked = false;                      // before each collective, compare kind, size, type and label over the ranks
  std::int64_t chunk_bytes = std::int64_t{1} << 20;        // of a pairwise exchange
  std::int64_t max_message_bytes = std::int64_t{1} << 30;  // longer messages are split
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // In place, non-blocking; buffers stay untouched until the event. Several buffers are one ledger entry per element type.
  Event all_gather(std::span<const GatherBuffer> buffers, const Label& label);
  // owned[0 .. shard) += (contribution of rank 0 + ... + rank W-1) [rank * shard ..]. full: [size * shard], kept until the event.
  Event reduce_scatter(const float* full, float* owned, std::int64_t shard, const Label& label);
  // data[0 .. size * shard) = sum over ranks, in rank order, in place; the same bits on all ranks.
  Event all_reduce(float* data, std::int64_t shard, const Label& label);
  // Scalars, blocking: sum in rank order in double.
  void all_reduce(std::span<double> values, const Label& label);
  void barrier(const Label& label);
  // Blocking, not counted: start-up comparisons (hashes of configurations). Result in rank order.
  std::vector<std::string> exchange(const std::string& mine);

  // Tells the other ranks that this one leaves, and waits for their acknowledgement (at most 5 s). Never throws.
  void leave(std::string_view reason, ExitCode code) noexcept;
  // Drives pending collectives; cheap. For Device::between_ops.
  virtual void progress() = 0;

  const Ledger& ledger() const { return ledger_; }
  void reset_ledger() { ledger_.reset(); }
  // Where this rank is, for messages of failures: "step 120".
  void set_where(std::string where) { where_ = std::move(where); }
  const std::string& where() const { return where_; }

 protected:
  Communicator(int rank, int size, CommunicatorOptions options) : rank_(rank), size_(size), options_(options) {}
  const CommunicatorOptions& options() const { return options_; }

 private:
  // The transports. Each starts work and returns; the event completes it.
  virtual Event start_all_gather(std::span<const GatherBuffer> buffers, const std::string& what) = 0;
  virtual Event start_reduce_scatter(const float* full, float* owned, std::int64_t shard, const std::string& what) = 0;
  virtual Event start_all_reduce(float* data, std::int64_t shard, const std::string& what) = 0;
  virtual std::vector<std::string> start_exchange(const std::string& mine, const std::string& what) = 0;
  virtual void tell_leaving(std::string_view reason, ExitCode code) noexcept = 0;

  int rank_, size_;
  CommunicatorOptions options_;
  Ledger ledger_;
  std::string where_;
};

// sim: ranks are threads of this process. Calls body(communicator) on `ranks` threads and rethrows the originating error.
struct SimOptions : CommunicatorOptions {
  std::chrono::microseconds delay{0};  // added to each collective
};
void run_ranks(int ranks, const SimOptions& options, const std::function<void(Communicator&)>& body);

// mpi: initialises MPI at first use (thread level FUNNELED, refused if less) and finalises it with the last communicator.
// Throws UsageError in a build without MPI.
std::unique_ptr<Communicator> make_mpi_communicator(const CommunicatorOptions& options);
// One rank, no library: collectives are copies.
std::unique_ptr<Communicator> make_single_communicator(const CommunicatorOptions& options);

}  // namespace regather
