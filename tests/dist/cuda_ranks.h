// Ranks as threads that have an emulated GPU each, or share one: a communicator over a transport for the GPUs' memory,
// whose messages go between the threads. As in a program, a rank's device outlives its communicator.
#pragma once
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "dist/gpu_transports.h"
#include "tensor/cuda/device.h"
#include "tests/cuda_emu/machine.h"

namespace regather::testing {

enum class Gpus { OneEach, OneForAll };

// A thread of `sim` as the host of an emulated GPU: where it waits for others, they get their turn.
class OnMachine final : public OverTransport {
 public:
  OnMachine(std::unique_ptr<Transport> sim, cuda_emu::Machine& machine, int rank, int size, Gpus gpus)
      : OverTransport(std::move(sim)),
        rank_(machine, rank, size),
        device_(gpus == Gpus::OneEach ? rank : 0, 0, std::int64_t{64} << 10) {}
  std::unique_ptr<Transfer> all_gather(std::span<const GatherBuffer> buffers, const TransferCall& call) override {
    return std::make_unique<Polled>(host().all_gather(buffers, call));
  }
  std::unique_ptr<Transfer> reduce_scatter(float* full, float* owned, std::int64_t shard,
                                           const TransferCall& call) override {
    return std::make_unique<Polled>(host().reduce_scatter(full, owned, shard, call));
  }
  std::unique_ptr<Transfer> all_reduce(float* data, std::int64_t shard, const TransferCall& call) override {
    return std::make_unique<Polled>(host().all_reduce(data, shard, call));
  }
  void idle(std::int64_t) override { cuda_emu::yield(); }
  CudaDevice& device() { return device_; }

 private:
  struct Polled final : Transfer {
    explicit Polled(std::unique_ptr<Transfer> t) : transfer(std::move(t)) {}
    TransferProgress poll() override {
      const TransferProgress progress = transfer->poll();
      if (progress == TransferProgress::None) cuda_emu::yield();
      return progress;
    }
    std::unique_ptr<Transfer> transfer;
  };
  cuda_emu::Rank rank_;
  CudaDevice device_;
};

using MakeTransport = std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>, int rank, int size)>;

inline void run_cuda_ranks(cuda_emu::Machine& machine, int ranks, SimOptions options, const MakeTransport& make,
                           const std::function<void(Communicator&, CudaDevice&)>& body, Gpus gpus = Gpus::OneEach) {
  std::vector<CudaDevice*> devices(static_cast<std::size_t>(ranks));
  options.over = [&](std::unique_ptr<Transport> sim, int rank, int size) {
    auto host = std::make_unique<OnMachine>(std::move(sim), machine, rank, size, gpus);
    devices[static_cast<std::size_t>(rank)] = &host->device();
    return make(std::move(host), rank, size);
  };
  run_ranks(ranks, options, [&](Communicator& comm) { body(comm, *devices[static_cast<std::size_t>(comm.rank())]); });
}

}  // namespace regather::testing
