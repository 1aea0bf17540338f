// One rank: a gathered buffer is the shard already, and a sum has one term. No library, no messages.
#include <array>

#include "dist/rank_order_sum.h"
#include "dist/transport.h"

namespace regather {
namespace {

class SingleTransport final : public Transport {
 public:
  std::unique_ptr<Transfer> all_gather(std::span<const GatherBuffer>, const TransferCall&) override { return nullptr; }
  std::unique_ptr<Transfer> reduce_scatter(float* full, float* owned, std::int64_t shard,
                                           const TransferCall&) override {
    if (device_ && device_->kind() != DeviceKind::Cpu)
      device_->add(Stream::Compute, owned, owned, full, shard);
    else
      sum_in_rank_order(std::array<const float*, 1>{full}, shard, owned, SumInto::Add);
    return nullptr;
  }
  std::unique_ptr<Transfer> all_reduce(float*, std::int64_t, const TransferCall&) override { return nullptr; }
  void send(int to, std::string) override { throw LogicError(fmt::format("a message to rank {} of 1 rank", to)); }
  bool receive(int&, std::string&) override { return false; }
  bool delivered() override { return true; }
  bool gone(int) override { return false; }
  void idle(std::int64_t) override {}
  void use_memory_of(Device& device, Peers&) override { device_ = &device; }

 private:
  Device* device_ = nullptr;
};

}  // namespace

std::unique_ptr<Communicator> make_single_communicator(const CommunicatorOptions& options) {
  return std::make_unique<Communicator>(0, 1, options, std::make_unique<SingleTransport>());
}

}  // namespace regather
