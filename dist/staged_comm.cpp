// staged: collectives between GPUs through the hosts' memory, so that ranks may share a GPU. A collective is cut into
// pieces; each goes from the device to pinned memory, is exchanged there by the transport below, and comes back:
//   all-gather      this rank's elements out; those of the others in.
//   reduce-scatter  every rank's elements and those that the sum is added to out; the latter in.
//   all-reduce      every rank's elements out, and in.
// So sums are the transport's below, bit for bit. Gathers and reductions have a lane each, on the device's stream of
// that name, with two pieces at once: one is exchanged while the other is copied. Pieces of a lane are exchanged in one
// order on every rank. The host drives them: a stream that waits for a collective makes the host wait until its last
// copy is enqueued.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <deque>
#include <vector>

#include "dist/gpu_transports.h"
#include "tensor/cuda/status.h"

namespace regather {
namespace {

constexpr std::size_t kPieces = 2;
constexpr std::int64_t kAlignment = 16;
constexpr std::int64_t kMostPieces = std::int64_t{1} << 30;  // of one collective, in its numbers of exchanges

class Pinned {
 public:
  explicit Pinned(std::int64_t bytes) {
    void* data = nullptr;
    cuda::check_status(cudaHostAlloc(&data, static_cast<std::size_t>(bytes), cudaHostAllocDefault), "cudaHostAlloc");
    data_ = static_cast<std::byte*>(data);
  }
  ~Pinned() { static_cast<void>(cudaFreeHost(data_)); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
};

class StagedTransport final : public OverTransport {
 public:
  StagedTransport(std::unique_ptr<Transport> below, int rank, int size, std::int64_t chunk_bytes)
      : OverTransport(std::move(below)),
        rank_(rank),
        size_(size),
        chunk_(std::max(kAlignment, chunk_bytes / kAlignment * kAlignment)) {}
  ~StagedTransport() override;

  std::unique_ptr<Transfer> all_gather(std::span<const GatherBuffer> buffers, const TransferCall& call) override;
  std::unique_ptr<Transfer> reduce_scatter(float* full, float* owned, std::int64_t shard,
                                           const TransferCall& call) override;
  std::unique_ptr<Transfer> all_reduce(float* data, std::int64_t shard, const TransferCall& call) override;
  std::unique_ptr<Transfer> all_gather_scalars(const GatherBuffer& buffer, const TransferCall& call) override {
    return OverTransport::all_gather_scalars(buffer, {call.sequence * kMostPieces, call.text});
  }
  void stop() noexcept override;
  void use_memory_of(Device& device, Peers& peers) override;
  std::int64_t staging_bytes() const override {
    return OverTransport::staging_bytes() + static_cast<std::int64_t>(lanes_.size() * kPieces) * slot_bytes();
  }

 private:
  enum class Kind { Gather, ReduceScatter, AllReduce };
  class Job;
  struct Piece {
    enum class At { Out, Exchange, In };
    Job* job;
    std::byte* slot;
    std::size_t buffer;
    std::int64_t begin, n, number;  // of this buffer's elements in each shard; of the job's pieces
    At at = At::Out;
    Event copied{};
    std::unique_ptr<Transfer> exchange{};
  };
  struct Lane {
    Stream stream;
    std::unique_ptr<Pinned> memory{};
    std::deque<Job*> to_start{};    // that have pieces which are not in flight
    std::deque<Piece> in_flight{};  // in the order of their start
    std::size_t next_slot = 0;
    Event copied{};  // the last of all, which the pieces' memory outlives
  };
  std::int64_t slot_bytes() const { return (size_ + 1) * chunk_; }
  std::unique_ptr<Transfer> start(Lane& lane, Kind kind, std::vector<GatherBuffer> buffers, float* owned,
                                  const TransferCall& call);
  TransferProgress drive(Lane& lane);
  TransferProgress drive(Lane& lane, Piece& piece);
  void start_piece(Lane& lane);
  bool adds_to_what_is_out(const Lane& lane) const;
  void copy(Lane& lane, Piece& piece, Piece::At direction);
  std::unique_ptr<Transfer> exchange(const Piece& piece);

  int rank_, size_;
  const std::int64_t chunk_;  // bytes of a rank's part of a piece
  Device* device_ = nullptr;
  std::array<Lane, 2> lanes_{{{Stream::Gather}, {Stream::Reduce}}};
};

// One collective.
class StagedTransport::Job final : public Transfer {
 public:
  Job(StagedTransport& t, Lane& l, Kind k, std::vector<GatherBuffer> b, float* o, const TransferCall& call)
      : kind(k), buffers(std::move(b)), owned(o), sequence(call.sequence), text(call.text), transport_(t), lane_(l) {}
  TransferProgress poll() override {
    const TransferProgress progress = transport_.drive(lane_);
    return all_started() && in_flight == 0 ? TransferProgress::Done : progress;
  }
  Event enqueued() const override { return all_started() && to_enqueue == 0 ? last_copy : Event(); }
  bool all_started() const { return buffer == buffers.size(); }

  const Kind kind;
  const std::vector<GatherBuffer> buffers;  // not empty ones
  float* const owned;
  const std::int64_t sequence;
  const std::string text;
  std::size_t buffer = 0;   // where the next piece begins,
  std::int64_t begin = 0;   // and with which element of each shard
  std::int64_t pieces = 0;  // started
  int in_flight = 0, to_enqueue = 0;
  Event last_copy;

 private:
  StagedTransport& transport_;
  Lane& lane_;
};

void StagedTransport::use_memory_of(Device& device, Peers&) {
  if (device.kind() != DeviceKind::Cuda)
    throw UsageError(
        "communication.backend: value 'staged' moves the memory of GPUs, and device is cpu; allowed: mpi, sim");
  device_ = &device;
  for (Lane& lane : lanes_)
    if (!lane.memory) lane.memory = std::make_unique<Pinned>(static_cast<std::int64_t>(kPieces) * slot_bytes());
}

// A failure leaves copies in the streams. They wait for no other rank, so neither does this.
StagedTransport::~StagedTransport() {
  for (const Lane& lane : lanes_) {
    try {
      for (std::int64_t round = 0; !lane.copied.done(); ++round) host().idle(round);
    } catch (...) {  // of a device that has failed: they run no more
    }
  }
}

void StagedTransport::stop() noexcept {
  for (Lane& lane : lanes_) {
    lane.to_start.clear();
    lane.in_flight.clear();
  }
  OverTransport::stop();
}

// ---- pieces ---------------------------------------------------------------------------------------------------------

// Between the device and the piece's memory, in which every rank's part is as long as the piece.
void StagedTransport::copy(Lane& lane, Piece& piece, Piece::At direction) {
  const Job& job = *piece.job;
  const GatherBuffer& b = job.buffers[piece.buffer];
  const bool out = direction == Piece::At::Out;
  const auto element = static_cast<std::int64_t>(size_of(b.dtype));
  const auto move = [&](void* device, std::int64_t part) {
    std::byte* const host = piece.slot + part * piece.n * element;
    device_->copy(lane.stream, out ? host : device, out ? device : host, piece.n * element);
  };
  for (int r = 0; r < size_; ++r) {
    const bool mine = r == rank_;
    if (job.kind == Kind::Gather ? mine != out : job.kind == Kind::ReduceScatter && !out) continue;
    move(static_cast<std::byte*>(b.full) + (r * b.shard + piece.begin) * element, r);
  }
  if (job.kind == Kind::ReduceScatter) move(job.owned + piece.begin, size_);
  piece.copied = lane.copied = device_->record(lane.stream);
}

std::unique_ptr<Transfer> StagedTransport::exchange(const Piece& piece) {
  const Job& job = *piece.job;
  const TransferCall call{job.sequence * kMostPieces + piece.number, job.text};
  float* const numbers = reinterpret_cast<float*>(piece.slot);
  if (job.kind == Kind::ReduceScatter) return host().reduce_scatter(numbers, numbers + size_ * piece.n, piece.n, call);
  if (job.kind == Kind::AllReduce) return host().all_reduce(numbers, piece.n, call);
  const GatherBuffer buffer{piece.slot, piece.n, job.buffers[piece.buffer].dtype};
  return host().all_gather({&buffer, 1}, call);
}

void StagedTransport::start_piece(Lane& lane) {
  Job& job = *lane.to_start.front();
  const GatherBuffer& b = job.buffers[job.buffer];
  const std::int64_t n = std::min(b.shard - job.begin, chunk_ / static_cast<std::int64_t>(size_of(b.dtype)));
  Piece& piece = lane.in_flight.emplace_back(
      Piece{&job, lane.memory->data() + static_cast<std::int64_t>(lane.next_slot) * slot_bytes(), job.buffer, job.begin,
            n, job.pieces++});
  lane.next_slot = (lane.next_slot + 1) % kPieces;
  ++job.in_flight;
  ++job.to_enqueue;
  job.begin += n;
  if (job.begin == b.shard) {
    ++job.buffer;
    job.begin = 0;
  }
  if (job.all_started()) lane.to_start.pop_front();
  copy(lane, piece, Piece::At::Out);
}

TransferProgress StagedTransport::drive(Lane& lane, Piece& piece) {
  switch (piece.at) {
    case Piece::At::Out:
      if (!piece.copied.done()) return TransferProgress::Queued;
      piece.exchange = exchange(piece);
      piece.at = Piece::At::Exchange;
      return TransferProgress::Some;
    case Piece::At::Exchange:
      if (piece.exchange)
        if (const TransferProgress progress = piece.exchange->poll(); progress != TransferProgress::Done)
          return progress;
      piece.exchange.reset();
      copy(lane, piece, Piece::At::In);
      --piece.job->to_enqueue;
      piece.job->last_copy = piece.copied;
      piece.at = Piece::At::In;
      return TransferProgress::Some;
    case Piece::At::In: return piece.copied.done() ? TransferProgress::Done : TransferProgress::Queued;
  }
  return TransferProgress::None;
}

// Would the next piece copy a sum out before the one in flight has come back?
bool StagedTransport::adds_to_what_is_out(const Lane& lane) const {
  const Job* next = lane.to_start.front();
  return next->kind == Kind::ReduceScatter && std::ranges::any_of(lane.in_flight, [&](const Piece& piece) {
           return piece.job != next && piece.job->owned == next->owned && piece.at != Piece::At::In;
         });
}

// Exchanges start in the order of the pieces; a piece whose memory another one needs is the oldest.
TransferProgress StagedTransport::drive(Lane& lane) {
  TransferProgress most = TransferProgress::None;
  while (true) {
    while (lane.in_flight.size() < kPieces && !lane.to_start.empty() && !adds_to_what_is_out(lane)) {
      start_piece(lane);
      most = TransferProgress::Some;
    }
    bool ended = false, waits_for_others = false;
    for (Piece& piece : lane.in_flight) {
      const TransferProgress progress = drive(lane, piece);
      ended = ended || (progress == TransferProgress::Done && &piece == &lane.in_flight.front());
      waits_for_others = waits_for_others || (piece.at == Piece::At::Exchange && progress == TransferProgress::None);
      if (progress == TransferProgress::Some || (progress == TransferProgress::Queued && !waits_for_others))
        most = std::max(most, progress);
      if (piece.at == Piece::At::Out) break;  // the next one's exchange comes after this one's
    }
    if (!ended) return most;
    --lane.in_flight.front().job->in_flight;
    lane.in_flight.pop_front();
    most = TransferProgress::Some;
  }
}

// ---- collectives ----------------------------------------------------------------------------------------------------

std::unique_ptr<Transfer> StagedTransport::start(Lane& lane, Kind kind, std::vector<GatherBuffer> buffers, float* owned,
                                                 const TransferCall& call) {
  check(device_ != nullptr, "{}: staged moves the memory of a GPU, and was given none", call.text);
  std::erase_if(buffers, [](const GatherBuffer& b) { return b.shard == 0; });
  if (buffers.empty()) return nullptr;
  auto job = std::make_unique<Job>(*this, lane, kind, std::move(buffers), owned, call);
  lane.to_start.push_back(job.get());
  drive(lane);
  return job;
}

std::unique_ptr<Transfer> StagedTransport::all_gather(std::span<const GatherBuffer> buffers, const TransferCall& call) {
  return start(lanes_[0], Kind::Gather, {buffers.begin(), buffers.end()}, nullptr, call);
}

std::unique_ptr<Transfer> StagedTransport::reduce_scatter(float* full, float* owned, std::int64_t shard,
                                                          const TransferCall& call) {
  return start(lanes_[1], Kind::ReduceScatter, {{full, shard, DType::F32}}, owned, call);
}

std::unique_ptr<Transfer> StagedTransport::all_reduce(float* data, std::int64_t shard, const TransferCall& call) {
  return start(lanes_[1], Kind::AllReduce, {{data, shard, DType::F32}}, nullptr, call);
}

}  // namespace

std::unique_ptr<Transport> make_staged_transport(std::unique_ptr<Transport> below, int rank, int size,
                                                 std::int64_t chunk_bytes) {
  return std::make_unique<StagedTransport>(std::move(below), rank, size, chunk_bytes);
}

std::unique_ptr<Communicator> make_staged_communicator(const CommunicatorOptions& options) {
  Joined joined = join_mpi(options);
  return std::make_unique<Communicator>(
      joined.rank, joined.size, options,
      make_staged_transport(std::move(joined.transport), joined.rank, joined.size, options.chunk_bytes));
}

}  // namespace regather
