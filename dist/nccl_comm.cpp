// nccl: collectives between GPUs, one for each rank, enqueued on the device's own streams.
//   all-gather      in place, buffers of one call in one group, on Stream::Gather.
//   reduce-scatter  in place, too: the sum replaces this rank's part of `full`, from where it is added to `owned`. So
//                   there is no other memory for receiving. On Stream::Reduce.
//   all-reduce      in place, on Stream::Reduce.
// One NCCL communicator, whose collectives run in the order of their start, on both streams. It does not block: what a
// call leaves in progress is polled like everything else, so that a rank which is gone or has failed ends a wait here
// with the same words, and ncclCommAbort takes what is in flight off the device.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <exception>
#include <future>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "dist/gpu_transports.h"
#include "dist/peers.h"
#include "tensor/cuda/device.h"
#include "tensor/cuda/status.h"

namespace regather {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kReasonGrace = 1s;    // for the word of the rank whose end broke NCCL
constexpr auto kFinishTimeout = 5s;  // of a communicator's end, with its last bytes or without them
constexpr auto kAbortGrace = 300ms;

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::F32: return ncclFloat32;
    case DType::BF16: return ncclBfloat16;
    case DType::F64: return ncclFloat64;
    case DType::I32: return ncclInt32;
  }
  throw LogicError("an element type that NCCL does not have");
}

struct Gpu {
  std::string id, name;
  bool operator==(const Gpu&) const = default;
};

class NcclTransport final : public OverTransport {
 public:
  NcclTransport(std::unique_ptr<Transport> messages, int rank, int size)
      : OverTransport(std::move(messages)), rank_(rank), size_(size) {}
  ~NcclTransport() override {
    end();
    if (aborted_.valid()) aborted_.wait_for(kFinishTimeout);
  }

  std::unique_ptr<Transfer> all_gather(std::span<const GatherBuffer> buffers, const TransferCall& call) override;
  std::unique_ptr<Transfer> reduce_scatter(float* full, float* owned, std::int64_t shard,
                                           const TransferCall& call) override;
  std::unique_ptr<Transfer> all_reduce(float* data, std::int64_t shard, const TransferCall& call) override;
  void stop() noexcept override;
  void abandon() noexcept override {
    stop();
    OverTransport::abandon();
  }
  void use_memory_of(Device& device, Peers& peers) override;

 private:
  class Flight;
  std::vector<Gpu> exchange_gpus(int index);
  void make_communicator(int index);
  void end() noexcept;
  ncclResult_t state() const;
  [[noreturn]] void fail(ncclResult_t result, const char* call) const;
  void settle(ncclResult_t result, const char* call, std::string_view doing);
  template <class Post, class Then>
  std::unique_ptr<Transfer> launch(Stream stream, const TransferCall& call, Post post, Then then);
  bool broken();

  int rank_, size_;
  Peers* peers_ = nullptr;
  CudaDevice* device_ = nullptr;
  std::vector<Gpu> gpus_;  // of the ranks that the communicator is of
  std::int64_t exchanges_ = 0;
  ncclComm_t comm_ = nullptr;
  std::optional<Clock::time_point> broken_since_;
  std::future<void> aborted_;
  int exceptions_ = std::uncaught_exceptions();
  std::shared_ptr<std::deque<const Flight*>> order_ = std::make_shared<std::deque<const Flight*>>();
};

// Between two events of its stream. NCCL runs the collectives of a communicator one after the other, whatever their
// streams; so it is the oldest that waits for other ranks, once the device is through with what comes before it.
class NcclTransport::Flight final : public Transfer {
 public:
  Flight(NcclTransport& transport, Event begun, Event ended)
      : transport_(transport), order_(transport.order_), begun_(std::move(begun)), ended_(std::move(ended)) {
    order_->push_back(this);
  }
  ~Flight() override { std::erase(*order_, this); }
  TransferProgress poll() override {
    if (transport_.broken()) return TransferProgress::None;
    if (ended_.done()) return TransferProgress::Done;
    if (order_->front() != this) return TransferProgress::None;
    return begun_.done() ? TransferProgress::None : TransferProgress::Queued;
  }
  Event enqueued() const override { return ended_; }

 private:
  NcclTransport& transport_;
  std::shared_ptr<std::deque<const Flight*>> order_;  // of those in flight; outlives the transport
  Event begun_, ended_;
};

void NcclTransport::fail(ncclResult_t result, const char* call) const {
  const char* more = ncclGetLastError(comm_);
  throw Error(fmt::format("{}: {}{}{}{}", call, ncclGetErrorString(result), more && *more ? ": " : "", more ? more : "",
                          result == ncclUnhandledCudaError ? cuda::word_of_runtime() : ""),
              result == ncclRemoteError ? ExitCode::PeerVanished : ExitCode::Failed);
}

ncclResult_t NcclTransport::state() const {
  ncclResult_t state = ncclSuccess;
  if (const ncclResult_t result = ncclCommGetAsyncError(comm_, &state); result != ncclSuccess)
    fail(result, "ncclCommGetAsyncError");
  return state;
}

// True once NCCL has found an error. It is thrown a moment later: the rank that caused it has more to tell.
bool NcclTransport::broken() {
  const ncclResult_t now = state();
  if (now == ncclSuccess || now == ncclInProgress) return false;
  if (!broken_since_) broken_since_ = Clock::now();
  if (Clock::now() - *broken_since_ > kReasonGrace) fail(now, "NCCL");
  return true;
}

// Until NCCL is through with a call, and a stream has what the call enqueues.
void NcclTransport::settle(ncclResult_t result, const char* call, std::string_view doing) {
  if (result == ncclSuccess) return;
  if (result != ncclInProgress) fail(result, call);
  peers_->wait(doing,
               [&] { return broken() || state() == ncclInProgress ? TransferProgress::None : TransferProgress::Done; });
}

// ---- the communicator -----------------------------------------------------------------------------------------------

void NcclTransport::use_memory_of(Device& device, Peers& peers) {
  if (device.kind() != DeviceKind::Cuda)
    throw UsageError(
        "communication.backend: value 'nccl' moves the memory of GPUs, and device is cpu; allowed: mpi, sim");
  peers_ = &peers;
  device_ = &static_cast<CudaDevice&>(device);
  std::vector<Gpu> gpus = exchange_gpus(device_->index());
  if (comm_ && gpus == gpus_) return;
  end();
  gpus_ = std::move(gpus);
  make_communicator(device_->index());
}

// Of all ranks. NCCL would hang, or say something about an invalid usage, where two ranks use one.
std::vector<Gpu> NcclTransport::exchange_gpus(int index) {
  const GpuInfo mine = cuda_gpus().at(static_cast<std::size_t>(index));
  std::vector<Gpu> gpus;
  for (const std::string& text :
       peers_->exchange(Peers::Channel::Devices, exchanges_++, mine.id + " " + mine.name, "exchange of GPUs")) {
    const std::size_t space = text.find(' ');
    gpus.push_back({text.substr(0, space), text.substr(space + 1)});
  }
  for (std::size_t b = 0; b < gpus.size(); ++b)
    for (std::size_t a = 0; a < b; ++a)
      if (gpus[a].id == gpus[b].id)
        throw UsageError(
            fmt::format("communication.backend: value 'nccl' needs a GPU for each rank, and ranks {} and {} use the "
                        "same, {} ({}); communication.backend: staged lets ranks share GPUs",
                        a, b, gpus[a].id, gpus[a].name));
  return gpus;
}

void NcclTransport::make_communicator(int index) {
  ncclUniqueId id{};
  std::string text;
  if (rank_ == 0) {
    if (const ncclResult_t result = ncclGetUniqueId(&id); result != ncclSuccess) fail(result, "ncclGetUniqueId");
    text.assign(id.internal, sizeof id.internal);
  }
  const std::string of_first =
      peers_->exchange(Peers::Channel::Devices, exchanges_++, text, "exchange of NCCL's address").front();
  check(of_first.size() == sizeof id.internal, "an address of NCCL of {} bytes", of_first.size());
  std::memcpy(id.internal, of_first.data(), sizeof id.internal);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  cuda::check_status(cudaSetDevice(index), "cudaSetDevice");
  settle(ncclCommInitRankConfig(&comm_, size_, id, rank_, &config), "ncclCommInitRankConfig", "start of NCCL");
}

// ncclCommAbort makes the device give up what is in flight, at once; but NCCL may wait in it for the other ranks of
// this node to do the same. They will when they hear of the failure, which this rank has yet to tell, and one that is
// gone never will. So it has a thread of its own. Of its errors there is nobody to tell: another one is on its way.
void NcclTransport::stop() noexcept {
  if (!comm_) return;
  const ncclComm_t comm = std::exchange(comm_, nullptr);
  try {
    std::promise<void> done;
    aborted_ = done.get_future();
    int device = 0;
    static_cast<void>(cudaGetDevice(&device));
    std::thread([comm, device, promise = std::move(done)]() mutable {
      static_cast<void>(cudaSetDevice(device));  // a thread begins with the first, where NCCL would make a context
      static_cast<void>(ncclCommAbort(comm));
      promise.set_value();
    }).detach();
    aborted_.wait_for(kAbortGrace);
  } catch (...) {  // there are no more threads
    static_cast<void>(ncclCommAbort(comm));
  }
}

// What other ranks still receive of this one's goes out, if all is in order; nobody is waited for longer than that.
void NcclTransport::end() noexcept {
  if (!comm_) return;
  try {
    bool in_order = std::uncaught_exceptions() <= exceptions_ && !broken_since_;
    if (in_order) {
      ncclResult_t result = ncclCommFinalize(comm_);
      const auto deadline = Clock::now() + kFinishTimeout;
      for (std::int64_t round = 0; result == ncclInProgress && Clock::now() < deadline; ++round) {
        host().idle(round);
        result = state();
      }
      in_order = result == ncclSuccess;
    }
    if (!in_order) return stop();
    static_cast<void>(ncclCommDestroy(comm_));
    comm_ = nullptr;
  } catch (...) {
    stop();
  }
}

// ---- collectives ----------------------------------------------------------------------------------------------------

// post: calls NCCL, and returns the first result that is not success. then: enqueues what follows.
template <class Post, class Then>
std::unique_ptr<Transfer> NcclTransport::launch(Stream stream, const TransferCall& call, Post post, Then then) {
  check(comm_ != nullptr, "{}: nccl moves the memory of a GPU, and was given none", call.text);
  Event begun = device_->record(stream);
  if (const ncclResult_t result = ncclGroupStart(); result != ncclSuccess) fail(result, "ncclGroupStart");
  const ncclResult_t posted = post(device_->stream(stream));
  const ncclResult_t launched = ncclGroupEnd();
  if (posted != ncclSuccess && posted != ncclInProgress) fail(posted, "NCCL");
  settle(launched, "ncclGroupEnd", call.text);
  then();
  return std::make_unique<Flight>(*this, std::move(begun), device_->record(stream));
}

std::unique_ptr<Transfer> NcclTransport::all_gather(std::span<const GatherBuffer> buffers, const TransferCall& call) {
  const auto empty = [](const GatherBuffer& b) { return b.shard == 0; };
  if (std::ranges::all_of(buffers, empty)) return nullptr;
  const auto post = [&](cudaStream_t stream) {
    ncclResult_t result = ncclSuccess;
    for (const GatherBuffer& b : buffers) {
      const auto n = static_cast<std::size_t>(b.shard);
      const char* mine = static_cast<const char*>(b.full) + static_cast<std::size_t>(rank_) * n * size_of(b.dtype);
      if (n > 0 && result == ncclSuccess) result = ncclAllGather(mine, b.full, n, nccl_type(b.dtype), comm_, stream);
    }
    return result;
  };
  return launch(Stream::Gather, call, post, [] {});
}

std::unique_ptr<Transfer> NcclTransport::reduce_scatter(float* full, float* owned, std::int64_t shard,
                                                        const TransferCall& call) {
  if (shard == 0) return nullptr;
  float* const mine = full + rank_ * shard;
  const auto post = [&](cudaStream_t stream) {
    return ncclReduceScatter(full, mine, static_cast<std::size_t>(shard), ncclFloat32, ncclSum, comm_, stream);
  };
  return launch(Stream::Reduce, call, post, [&] { device_->add(Stream::Reduce, owned, owned, mine, shard); });
}

std::unique_ptr<Transfer> NcclTransport::all_reduce(float* data, std::int64_t shard, const TransferCall& call) {
  if (shard == 0) return nullptr;
  const auto post = [&](cudaStream_t stream) {
    return ncclAllReduce(data, data, static_cast<std::size_t>(size_ * shard), ncclFloat32, ncclSum, comm_, stream);
  };
  return launch(Stream::Reduce, call, post, [] {});
}

}  // namespace

std::unique_ptr<Transport> make_nccl_transport(std::unique_ptr<Transport> messages, int rank, int size) {
  return std::make_unique<NcclTransport>(std::move(messages), rank, size);
}

std::unique_ptr<Communicator> make_nccl_communicator(const CommunicatorOptions& options) {
  Joined joined = join_mpi(options);
  return std::make_unique<Communicator>(joined.rank, joined.size, options,
                                        make_nccl_transport(std::move(joined.transport), joined.rank, joined.size));
}

}  // namespace regather
