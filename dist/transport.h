// What a backend implements: data collectives that are started here and driven by polling, and small messages between
// two ranks. Nothing in it blocks, times, counts or words an error about another rank: Communicator and Peers do that
// once for all backends. Invariant: transfers of one transport are started in the same order, with the same sequence,
// on every rank.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "dist/communicator.h"

namespace regather {

enum class TransferProgress { None, Some, Done };

// A collective in flight on this rank.
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual TransferProgress poll() = 0;  // after Done it is not polled again
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
  virtual std::unique_ptr<Transfer> reduce_scatter(const float* full, float* owned, std::int64_t shard,
                                                   const TransferCall& call) = 0;
  virtual std::unique_ptr<Transfer> all_reduce(float* data, std::int64_t shard, const TransferCall& call) = 0;

  // Messages of one rank to another arrive in order.
  virtual void send(int to, std::string message) = 0;
  virtual bool receive(int& from, std::string& message) = 0;
  // True when every message has been handed over: until then the receiver may depend on this rank's polling.
  virtual bool delivered() = 0;

  // True only if that rank is known to have ended: it will never answer.
  virtual bool gone(int rank) = 0;
  // Between two polls that found nothing; round counts them. Gives the core away when others may need it.
  virtual void idle(std::int64_t round) = 0;
  // This rank leaves after a failure: from now on only messages, and no goodbye to the library at the end, which would
  // wait for ranks that may never come to it;
  virtual void abandon() noexcept {}
  // except here, when every rank is known to come: launchers then report the ranks' own exit code.
  virtual void end_together() noexcept {}
  // Memory that the backend holds for receiving; outside the allocator's counts, constant.
  virtual std::int64_t staging_bytes() const { return 0; }
  // Throws UsageError if it cannot move the device's memory.
  virtual void use_memory_of(Device& device) {
    if (device.kind() != DeviceKind::Cpu)
      throw UsageError("device: cuda: this backend of communication moves the host's memory only");
  }
  // False: counts only; buffers may be null.
  virtual bool moves_data() const { return true; }
};

}  // namespace regather
