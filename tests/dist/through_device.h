// A transport of the host's memory through one of a device's: what a collective is given goes to the device when it
// starts, and comes back when it has ended. For tests whose numbers are the host's.
#pragma once
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "dist/transport.h"

namespace regather::testing {

class ThroughDevice final : public OverTransport {
 public:
  ThroughDevice(std::unique_ptr<Transport> inner, int size) : OverTransport(std::move(inner)), size_(size) {}

  std::unique_ptr<Transfer> all_gather(std::span<const GatherBuffer> buffers, const TransferCall& call) override;
  std::unique_ptr<Transfer> reduce_scatter(float* full, float* owned, std::int64_t shard,
                                           const TransferCall& call) override;
  std::unique_ptr<Transfer> all_reduce(float* data, std::int64_t shard, const TransferCall& call) override;
  void use_memory_of(Device& device, Peers& peers) override {
    host().use_memory_of(device, peers);
    device_ = &device;
  }

 private:
  struct Copied {  // what the device has of the host's memory; host: null if the host does not want it back
    void* host;
    std::shared_ptr<Buffer> device;
  };
  class Moved;
  std::shared_ptr<Buffer> put(Stream stream, const void* from, std::int64_t bytes);

  Device* device_ = nullptr;
  int size_;
  std::map<const void*, std::weak_ptr<Buffer>> sums_;  // that several reductions in flight may add to
};

class ThroughDevice::Moved final : public Transfer {
 public:
  Moved(Device& device, std::unique_ptr<Transfer> transfer, std::vector<Copied> results)
      : device_(device), transfer_(std::move(transfer)), results_(std::move(results)) {}
  TransferProgress poll() override {
    const TransferProgress progress = transfer_ ? transfer_->poll() : TransferProgress::Done;
    if (progress != TransferProgress::Done) return progress;
    for (const Copied& result : results_)
      if (result.host && result.device.use_count() == 1 && result.device->bytes() > 0)
        device_.read(Stream::ToHost, result.host, result.device->data(), result.device->bytes());
    results_.clear();
    return progress;
  }

 private:
  Device& device_;
  std::unique_ptr<Transfer> transfer_;
  std::vector<Copied> results_;
};

inline std::shared_ptr<Buffer> ThroughDevice::put(Stream stream, const void* from, std::int64_t bytes) {
  auto buffer = std::make_shared<Buffer>(device_->memory, bytes, Tag::Workspace);
  device_->wait(stream, device_->record(Stream::Compute));  // memory is there in the order of compute
  if (bytes > 0) device_->write(stream, buffer->data(), from, bytes);
  return buffer;
}

inline std::unique_ptr<Transfer> ThroughDevice::all_gather(std::span<const GatherBuffer> buffers,
                                                           const TransferCall& call) {
  std::vector<Copied> copied;
  std::vector<GatherBuffer> on_device;
  for (const GatherBuffer& b : buffers) {
    const std::int64_t bytes = size_ * b.shard * static_cast<std::int64_t>(size_of(b.dtype));
    copied.push_back({b.full, put(Stream::Gather, b.full, bytes)});
    on_device.push_back({copied.back().device->data(), b.shard, b.dtype});
  }
  auto transfer = host().all_gather(on_device, call);
  return std::make_unique<Moved>(*device_, std::move(transfer), std::move(copied));
}

inline std::unique_ptr<Transfer> ThroughDevice::reduce_scatter(float* full, float* owned, std::int64_t shard,
                                                               const TransferCall& call) {
  const std::int64_t bytes = shard * static_cast<std::int64_t>(sizeof(float));
  const std::shared_ptr<Buffer> all = put(Stream::Reduce, full, size_ * bytes);
  std::shared_ptr<Buffer> sum = sums_[owned].lock();
  if (!sum || shard == 0) sums_[owned] = sum = put(Stream::Reduce, owned, bytes);
  auto transfer = host().reduce_scatter(all->data<float>(), sum->data<float>(), shard, call);
  std::vector<Copied> copied = {{owned, std::move(sum)}, {nullptr, all}};
  return std::make_unique<Moved>(*device_, std::move(transfer), std::move(copied));
}

inline std::unique_ptr<Transfer> ThroughDevice::all_reduce(float* data, std::int64_t shard, const TransferCall& call) {
  const std::shared_ptr<Buffer> copy =
      put(Stream::Reduce, data, size_ * shard * static_cast<std::int64_t>(sizeof(float)));
  auto transfer = host().all_reduce(copy->data<float>(), shard, call);
  return std::make_unique<Moved>(*device_, std::move(transfer), std::vector<Copied>{{data, copy}});
}

}  // namespace regather::testing
