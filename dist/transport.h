// What a backend implements: data collectives that are started here and driven by polling, and small messages between
// two ranks. Nothing in it blocks (but through Peers::wait), times, counts or words an error about another rank:
// Communicator and Peers do that once for all backends. Invariant: transfers of one transport are started in the same
// order, with the same sequence, on every rank.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "dist/communicator.h"

namespace regather {

// Queued: nothing moves, because this rank's device is still at work on what comes before.
enum class TransferProgress { None, Queued, Some, Done };

// A collective in flight on this rank.
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual TransferProgress poll() = 0;  // after Done it is not polled again
  // The device's event of its end, which a stream can wait for without the host. Empty: only polling ends it.
  virtual Event enqueued() const { return {}; }
};

// One collective, as ranks compare it. text: "all_gather of block 3 (forward) [fp32 x 100]".
struct TransferCall {
  std::int64_t sequence;
  std::string_view text;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Null: already complete. Arguments are valid; shard may be 0. See Communicator for the meaning.
  virtual std::unique_ptr<Transfer> all_gather(std::span<const GatherBuffer> buffers, const TransferCall& call) = 0;
  virtual std::unique_ptr<Transfer> reduce_scatter(float* full, float* owned, std::int64_t shard,
                                                   const TransferCall& call) = 0;
  virtual std::unique_ptr<Transfer> all_reduce(float* data, std::int64_t shard, const TransferCall& call) = 0;
  // Of scalars: in the host's memory, whatever use_memory_of() says.
  virtual std::unique_ptr<Transfer> all_gather_scalars(const GatherBuffer& buffer, const TransferCall& call) {
    return all_gather({&buffer, 1}, call);
  }

  // Messages of one rank to another arrive in order.
  virtual void send(int to, std::string message) = 0;
  virtual bool receive(int& from, std::string& message) = 0;
  // True when every message has been handed over: until then the receiver may depend on this rank's polling.
  virtual bool delivered() = 0;

  // True only if that rank is known to have ended: it will never answer.
  virtual bool gone(int rank) = 0;
  // Between two polls that found nothing; round counts them. Gives the core away when others may need it.
  virtual void idle(std::int64_t round) = 0;
  // A collective has failed on this rank: what is in flight ends here, without the others, and nothing is started.
  virtual void stop() noexcept {}
  // This rank leaves after a failure: from now on only messages, and no goodbye to the library at the end, which would
  // wait for ranks that may never come to it;
  virtual void abandon() noexcept {}
  // except here, when every rank is known to come: launchers then report the ranks' own exit code.
  virtual void end_together() noexcept {}
  // Memory that the backend holds for receiving; outside the allocator's counts, constant.
  virtual std::int64_t staging_bytes() const { return 0; }
  // Called on all ranks, which may wait for each other in it. Throws UsageError if it cannot move the device's memory.
  virtual void use_memory_of(Device& device, Peers& peers) {
    static_cast<void>(peers);
    if (device.kind() != DeviceKind::Cpu)
      throw UsageError("device: cuda: this backend of communication moves the host's memory only");
  }
  // False: counts only; buffers may be null.
  virtual bool moves_data() const { return true; }
};

// A transport whose messages are another's.
class OverTransport : public Transport {
 public:
  explicit OverTransport(std::unique_ptr<Transport> host) : host_(std::move(host)) {}
  std::unique_ptr<Transfer> all_gather_scalars(const GatherBuffer& buffer, const TransferCall& call) override {
    return host_->all_gather_scalars(buffer, call);
  }
  void send(int to, std::string message) override { host_->send(to, std::move(message)); }
  bool receive(int& from, std::string& message) override { return host_->receive(from, message); }
  bool delivered() override { return host_->delivered(); }
  bool gone(int rank) override { return host_->gone(rank); }
  void idle(std::int64_t round) override { host_->idle(round); }
  void stop() noexcept override { host_->stop(); }
  void abandon() noexcept override { host_->abandon(); }
  void end_together() noexcept override { host_->end_together(); }
  std::int64_t staging_bytes() const override { return host_->staging_bytes(); }

 protected:
  Transport& host() { return *host_; }

 private:
  std::unique_ptr<Transport> host_;
};

// The transport of a rank, and which rank that is.
struct Joined {
  int rank, size;
  std::unique_ptr<Transport> transport;
};
// This process as one of those that mpirun or srun started. Throws UsageError in a build without MPI.
Joined join_mpi(const CommunicatorOptions& options);

}  // namespace regather
