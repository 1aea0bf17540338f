// mpi: host memory and point-to-point messages only, in flight until a poll finds them done.
//   all-gather      in place: this rank's part to every other rank, and theirs received where they belong.
//   reduce-scatter  pairwise exchange in chunks: two chunks in flight, received beside each other and added in rank
//   order.
//                   MPI's own reduce-scatter is several times slower on one node, and adds in another order.
//   all-reduce      the former, then the latter.
// A message is tagged with its collective's sequence, so that a rank which skipped one waits instead of taking wrong
// data.
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdlib>
#include <exception>

#include "dist/mpi_requests.h"
#include "dist/process.h"
#include "dist/rank_order_sum.h"
#include "dist/transport.h"

namespace regather {
namespace {

using Clock = std::chrono::steady_clock;

// f(offset, bytes) for pieces of at most `limit` bytes.
template <class F>
void for_pieces(std::int64_t bytes, std::int64_t limit, F f) {
  for (std::int64_t begin = 0; begin < bytes; begin += limit) f(begin, std::min(limit, bytes - begin));
}

class HugePages {
 public:
  explicit HugePages(std::int64_t bytes) : bytes_((bytes + kPage - 1) / kPage * kPage) {
    if (bytes_ == 0) return;
    data_ = static_cast<float*>(std::aligned_alloc(kPage, static_cast<std::size_t>(bytes_)));
    if (!data_) throw OutOfMemory(fmt::format("no memory for {} bytes of receive buffers", bytes_));
    madvise(data_, static_cast<std::size_t>(bytes_), MADV_HUGEPAGE);
  }
  ~HugePages() { std::free(data_); }
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;
  float* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  static constexpr std::int64_t kPage = std::int64_t{2} << 20;
  float* data_ = nullptr;
  std::int64_t bytes_;
};

// Initialises MPI, unless the program has.
class MpiSession {
 public:
  MpiSession() {
    int finalized = 0, initialized = 0, provided = MPI_THREAD_SINGLE;
    MPI_Finalized(&finalized);
    if (finalized) throw LogicError("MPI has been finalised in this process, it cannot be started again");
    MPI_Initialized(&initialized);
    if (initialized) {
      MPI_Query_thread(&provided);
    } else {
      MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
      owns_ = true;
    }
    if (provided < MPI_THREAD_FUNNELED) {
      if (owns_) MPI_Finalize();
      throw UsageError(fmt::format("MPI provides thread level {}, regather needs MPI_THREAD_FUNNELED ({})", provided,
                                   MPI_THREAD_FUNNELED));
    }
  }
  ~MpiSession() {
    if (owns_ && !abandoned()) MPI_Finalize();
  }
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;
  void abandon() { abandoned_ = true; }
  void end() {
    if (owns_) MPI_Finalize();
    owns_ = false;
  }
  // A rank that unwinds without a goodbye would block in MPI_Finalize.
  bool abandoned() const { return abandoned_ || std::uncaught_exceptions() > exceptions_; }

 private:
  bool owns_ = false, abandoned_ = false;
  int exceptions_ = std::uncaught_exceptions();
};

class MpiTransport final : public Transport {
 public:
  explicit MpiTransport(const CommunicatorOptions& options);
  ~MpiTransport() override;

  int rank() const { return rank_; }
  int size() const { return size_; }

  std::unique_ptr<Transfer> all_gather(std::span<const GatherBuffer> buffers, const TransferCall& call) override;
  std::unique_ptr<Transfer> reduce_scatter(float* full, float* owned, std::int64_t shard,
                                           const TransferCall& call) override;
  std::unique_ptr<Transfer> all_reduce(float* data, std::int64_t shard, const TransferCall& call) override;
  void send(int to, std::string message) override;
  bool receive(int& from, std::string& message) override;
  bool delivered() override;
  bool gone(int rank) override;
  void idle(std::int64_t round) override;
  void abandon() noexcept override { session_.abandon(); }
  void end_together() noexcept override { session_.end(); }
  std::int64_t staging_bytes() const override { return staging_.bytes(); }

 private:
  class Gather;
  class Reduction;
  class AllReduce;
  struct Chunk {
    Reduction* of;
    std::int64_t begin, n;
    float* parts;  // of the other ranks, n elements each
    Requests requests;
  };
  struct Sent {
    std::string message;
    MPI_Request request;
  };
  struct Watched {
    Process process;
    bool visible = false, ended = false;
    Clock::time_point looked{};
  };
  static constexpr std::size_t kChunksInFlight = 2;

  static MPI_Comm duplicate(const char* name);
  static std::int64_t chunk_elements(const CommunicatorOptions& options);
  int tag_of(const TransferCall& call, int phase) const;
  int neighbour(int distance) const { return (rank_ + distance + size_) % size_; }
  void find_processes();
  bool drive_reductions();
  void start_chunk(Reduction& reduction);

  MpiSession session_;  // first in, last out
  MPI_Comm data_, control_;
  int rank_ = 0, size_ = 1;
  std::uint64_t tags_ = 32768;  // MPI's tags are below; at least this many
  std::int64_t max_message_, chunk_;
  bool crowded_ = false;
  HugePages staging_;
  std::deque<Reduction*> to_start_;  // that have chunks which are not in flight
  std::deque<Chunk> in_flight_;      // in the order of their start
  std::size_t next_staging_ = 0;
  std::deque<Sent> sent_;
  std::string incoming_;
  MPI_Request incoming_request_ = MPI_REQUEST_NULL;
  int incoming_from_ = 0;
  std::vector<Watched> processes_;
};

class MpiTransport::Gather final : public Transfer {
 public:
  Gather(const MpiTransport& t, std::span<const GatherBuffer> buffers, int tag) {
    for (const GatherBuffer& b : buffers) {
      const std::int64_t bytes = b.shard * static_cast<std::int64_t>(size_of(b.dtype));
      std::byte* full = static_cast<std::byte*>(b.full);
      for (int d = 1; d < t.size_; ++d) {
        const int from = t.neighbour(-d), to = t.neighbour(d);
        for_pieces(bytes, t.max_message_, [&](std::int64_t begin, std::int64_t n) {
          requests_.receive(full + from * bytes + begin, n, from, tag, t.data_);
        });
        for_pieces(bytes, t.max_message_, [&](std::int64_t begin, std::int64_t n) {
          requests_.send(full + t.rank_ * bytes + begin, n, to, tag, t.data_);
        });
      }
    }
  }
  TransferProgress poll() override { return requests_.poll(); }

 private:
  Requests requests_;
};

// Sums this rank's shard of everyone's `full` into `out`.
class MpiTransport::Reduction final : public Transfer {
 public:
  Reduction(MpiTransport& transport, const float* f, float* o, std::int64_t s, SumInto i, int t)
      : full(f), out(o), shard(s), into(i), tag(t), transport_(transport) {
    if (shard > 0) transport_.to_start_.push_back(this);
  }
  TransferProgress poll() override {
    const bool moved = transport_.drive_reductions();
    return summed == shard ? TransferProgress::Done : moved ? TransferProgress::Some : TransferProgress::None;
  }

  const float* const full;
  float* const out;
  const std::int64_t shard;
  const SumInto into;
  const int tag;
  std::int64_t started = 0, summed = 0;

 private:
  MpiTransport& transport_;
};

class MpiTransport::AllReduce final : public Transfer {
 public:
  AllReduce(MpiTransport& transport, float* data, std::int64_t shard, const TransferCall& call)
      : transport_(transport),
        buffer_{data, shard, DType::F32},
        gather_tag_(transport.tag_of(call, 1)),
        reduction_(transport, data, data + transport.rank_ * shard, shard, SumInto::Replace,
                   transport.tag_of(call, 0)) {}
  TransferProgress poll() override {
    if (gather_) return gather_->poll();
    const TransferProgress progress = reduction_.poll();
    if (progress != TransferProgress::Done) return progress;
    // What others still had to receive of this rank's contributions they have: sending them was part of the reduction.
    gather_ = std::make_unique<Gather>(transport_, std::span<const GatherBuffer>(&buffer_, 1), gather_tag_);
    return gather_->poll() == TransferProgress::Done ? TransferProgress::Done : TransferProgress::Some;
  }

 private:
  MpiTransport& transport_;
  GatherBuffer buffer_;
  int gather_tag_;
  Reduction reduction_;
  std::unique_ptr<Gather> gather_;
};

MPI_Comm MpiTransport::duplicate(const char* name) {
  MPI_Comm comm = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &comm), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_set_name(comm, name), "MPI_Comm_set_name");
  return comm;
}

std::int64_t MpiTransport::chunk_elements(const CommunicatorOptions& options) {
  const std::int64_t bytes = std::min({options.chunk_bytes, options.max_message_bytes, std::int64_t{INT_MAX}});
  return std::max(std::int64_t{1}, bytes / static_cast<std::int64_t>(sizeof(float)));
}

int world_size() {
  int size = 1;
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  return size;
}

MpiTransport::MpiTransport(const CommunicatorOptions& options)
    : data_(duplicate("regather data")),
      control_(duplicate("regather control")),
      size_(world_size()),
      max_message_(std::min(options.max_message_bytes, std::int64_t{INT_MAX})),
      chunk_(chunk_elements(options)),
      staging_((size_ - 1) * chunk_ * static_cast<std::int64_t>(sizeof(float) * kChunksInFlight)) {
  check_mpi(MPI_Comm_rank(data_, &rank_), "MPI_Comm_rank");
  int found = 0;
  const int* highest_tag = nullptr;
  check_mpi(MPI_Comm_get_attr(data_, MPI_TAG_UB, &highest_tag, &found), "MPI_Comm_get_attr");
  if (found) tags_ = static_cast<std::uint64_t>(*highest_tag) + 1;
  find_processes();
}

int MpiTransport::tag_of(const TransferCall& call, int phase) const {
  std::uint64_t hash = 14695981039346656037ull;  // FNV-1a
  const auto add = [&](unsigned char byte) { hash = (hash ^ byte) * 1099511628211ull; };
  for (const char c : call.text) add(static_cast<unsigned char>(c));
  for (int i = 0; i < 8; ++i) add(static_cast<unsigned char>(static_cast<std::uint64_t>(call.sequence) >> (8 * i)));
  return static_cast<int>((hash ^ (hash >> 32)) % (tags_ / 2)) * 2 + phase;
}

MpiTransport::~MpiTransport() {
  if (session_.abandoned()) {
    session_.abandon();
    return;
  }
  MPI_Comm_free(&control_);
  MPI_Comm_free(&data_);
}

// Which ranks are processes that can be seen from here, and whether the ranks of this node have a core each.
void MpiTransport::find_processes() {
  MPI_Comm node = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(control_, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node), "MPI_Comm_split_type");
  int on_node = 1, leader = rank_;
  check_mpi(MPI_Comm_size(node, &on_node), "MPI_Comm_size");
  check_mpi(MPI_Bcast(&leader, 1, MPI_INT, 0, node), "MPI_Bcast");
  check_mpi(MPI_Comm_free(&node), "MPI_Comm_free");
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  crowded_ = sched_getaffinity(0, sizeof allowed, &allowed) != 0 || on_node > CPU_COUNT(&allowed);

  const Process self = look_up_process(getpid());
  const std::array<unsigned long long, 3> mine{static_cast<unsigned long long>(self.pid), self.start,
                                               static_cast<unsigned long long>(leader)};
  std::vector<std::array<unsigned long long, 3>> all(static_cast<std::size_t>(size_));
  check_mpi(MPI_Allgather(mine.data(), 3, MPI_UNSIGNED_LONG_LONG, all.data(), 3, MPI_UNSIGNED_LONG_LONG, control_),
            "MPI_Allgather");
  for (const auto& [pid, start, their_leader] : all) {
    Watched& w = processes_.emplace_back();
    w.process = {static_cast<std::int64_t>(pid), start};
    w.visible = pid != 0 && static_cast<int>(their_leader) == leader && look_up_process(w.process.pid) == w.process;
  }
}

bool MpiTransport::gone(int rank) {
  constexpr auto kInterval = std::chrono::milliseconds(10);
  Watched& w = processes_[static_cast<std::size_t>(rank)];
  if (!w.visible || w.ended) return w.ended;
  const auto now = Clock::now();
  if (now - w.looked > kInterval) {
    w.looked = now;
    w.ended = look_up_process(w.process.pid) != w.process;
  }
  return w.ended;
}

void MpiTransport::idle(std::int64_t round) {
  constexpr std::int64_t kSpins = 200, kYields = 2000;
  if (!crowded_ && round < kSpins) return;
  if (round < kYields) {
    sched_yield();
    return;
  }
  const timespec moment{0, 50'000};
  nanosleep(&moment, nullptr);
}

void MpiTransport::send(int to, std::string message) {
  Sent& sent = sent_.emplace_back(Sent{std::move(message), MPI_REQUEST_NULL});
  check(sent.message.size() <= INT_MAX, "a message of {} bytes to rank {}", sent.message.size(), to);
  check_mpi(
      MPI_Isend(sent.message.data(), static_cast<int>(sent.message.size()), MPI_BYTE, to, 0, control_, &sent.request),
      "MPI_Isend");
}

bool MpiTransport::delivered() {
  std::erase_if(sent_, [](Sent& sent) {
    int done = 0;
    check_mpi(MPI_Test(&sent.request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    return done != 0;
  });
  return sent_.empty();
}

bool MpiTransport::receive(int& from, std::string& message) {
  if (!sent_.empty()) delivered();
  int done = 0;
  if (incoming_request_ == MPI_REQUEST_NULL) {
    MPI_Message probed = MPI_MESSAGE_NULL;
    MPI_Status status;
    check_mpi(MPI_Improbe(MPI_ANY_SOURCE, 0, control_, &done, &probed, &status), "MPI_Improbe");
    if (!done) return false;
    int bytes = 0;
    check_mpi(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    incoming_.resize(static_cast<std::size_t>(bytes));
    incoming_from_ = status.MPI_SOURCE;
    check_mpi(MPI_Imrecv(incoming_.data(), bytes, MPI_BYTE, &probed, &incoming_request_), "MPI_Imrecv");
  }
  check_mpi(MPI_Test(&incoming_request_, &done, MPI_STATUS_IGNORE), "MPI_Test");
  if (!done) return false;
  from = incoming_from_;
  message = std::move(incoming_);
  return true;
}

std::unique_ptr<Transfer> MpiTransport::all_gather(std::span<const GatherBuffer> buffers, const TransferCall& call) {
  return std::make_unique<Gather>(*this, buffers, tag_of(call, 0));
}

std::unique_ptr<Transfer> MpiTransport::reduce_scatter(float* full, float* owned, std::int64_t shard,
                                                       const TransferCall& call) {
  auto reduction = std::make_unique<Reduction>(*this, full, owned, shard, SumInto::Add, tag_of(call, 0));
  drive_reductions();
  return reduction;
}

std::unique_ptr<Transfer> MpiTransport::all_reduce(float* data, std::int64_t shard, const TransferCall& call) {
  auto all_reduce = std::make_unique<AllReduce>(*this, data, shard, call);
  drive_reductions();
  return all_reduce;
}

void MpiTransport::start_chunk(Reduction& r) {
  Chunk& chunk = in_flight_.emplace_back(Chunk{&r, r.started, std::min(chunk_, r.shard - r.started), nullptr, {}});
  chunk.parts = staging_.data() + static_cast<std::int64_t>(next_staging_) * (size_ - 1) * chunk_;
  next_staging_ = (next_staging_ + 1) % kChunksInFlight;
  r.started += chunk.n;
  const std::int64_t bytes = chunk.n * static_cast<std::int64_t>(sizeof(float));
  for (int d = 1; d < size_; ++d) {
    const int from = neighbour(-d), to = neighbour(d);
    const int slot = from < rank_ ? from : from - 1;
    chunk.requests.receive(chunk.parts + slot * chunk_, bytes, from, r.tag, data_);
    chunk.requests.send(r.full + to * r.shard + chunk.begin, bytes, to, r.tag, data_);
  }
}

// Chunks end in the order of their start, on every rank: two sums into the same place must not change places.
bool MpiTransport::drive_reductions() {
  bool moved = false;
  while (true) {
    while (in_flight_.size() < kChunksInFlight && !to_start_.empty()) {
      if (to_start_.front()->started < to_start_.front()->shard) {
        start_chunk(*to_start_.front());
      } else {
        to_start_.pop_front();
      }
    }
    if (in_flight_.empty()) return moved;
    Chunk& chunk = in_flight_.front();
    const TransferProgress progress = chunk.requests.poll();
    moved = moved || progress != TransferProgress::None;
    if (progress != TransferProgress::Done) return moved;
    Reduction& r = *chunk.of;
    std::vector<const float*> parts;
    for (int from = 0; from < size_; ++from) {
      const int slot = from < rank_ ? from : from - 1;
      parts.push_back(from == rank_ ? r.full + rank_ * r.shard + chunk.begin : chunk.parts + slot * chunk_);
    }
    sum_in_rank_order(parts, chunk.n, r.out + chunk.begin, r.into);
    r.summed += chunk.n;
    in_flight_.pop_front();
  }
}

}  // namespace

Joined join_mpi(const CommunicatorOptions& options) {
  auto transport = std::make_unique<MpiTransport>(options);
  const int rank = transport->rank(), size = transport->size();
  return {rank, size, std::move(transport)};
}

}  // namespace regather
