// Counts what would be communicated between ranks and moves nothing: for running a step without storage.
#include "dist/transport.h"

namespace regather {
namespace {

class DryTransport final : public Transport {
 public:
  std::unique_ptr<Transfer> all_gather(std::span<const GatherBuffer>, const TransferCall&) override { return nullptr; }
  std::unique_ptr<Transfer> reduce_scatter(float*, float*, std::int64_t, const TransferCall&) override {
    return nullptr;
  }
  std::unique_ptr<Transfer> all_reduce(float*, std::int64_t, const TransferCall&) override { return nullptr; }
  void send(int, std::string) override {}
  bool receive(int&, std::string&) override { return false; }
  bool moves_data() const override { return false; }
  bool delivered() override { return true; }
  bool gone(int) override { return false; }
  void idle(std::int64_t) override {}
};

}  // namespace

std::unique_ptr<Communicator> make_dry_communicator(int rank, int size) {
  return std::make_unique<Communicator>(rank, size, CommunicatorOptions{}, std::make_unique<DryTransport>());
}

}  // namespace regather
