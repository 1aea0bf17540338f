// sim: ranks are threads of one process. A contribution is copied when its collective starts, so that a rank which
// fails takes no buffer away from the others; each rank writes its own results, from its own thread, when it polls.
// Differences of size, type or order between ranks, and a buffer that changes while it is in flight, are always errors
// here.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <thread>

#include "dist/rank_order_sum.h"
#include "dist/transport.h"

namespace regather {
namespace {

using Clock = std::chrono::steady_clock;
using Bytes = std::vector<std::byte>;

// One collective, of all ranks. Parts are written before `arrived` counts them, under the hub's mutex.
struct Meeting {
  std::string text;  // of the rank that came first
  int first = 0;
  std::vector<Bytes> parts;
  int arrived = 0;
  Clock::time_point ready{};  // when all have arrived and the delay is over
};

// What the ranks share.
class Hub {
 public:
  Hub(int ranks, std::chrono::microseconds delay)
      : ranks_(ranks),
        delay_(delay),
        inboxes_(static_cast<std::size_t>(ranks)),
        ended_(static_cast<std::size_t>(ranks)) {}

  std::shared_ptr<Meeting> arrive(int rank, const TransferCall& call, Bytes part) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Meeting>& meeting = meetings_[call.sequence];
    if (!meeting) {
      meeting = std::make_shared<Meeting>();
      meeting->text = call.text;
      meeting->first = rank;
      meeting->parts.resize(static_cast<std::size_t>(ranks_));
    }
    if (meeting->text != call.text)
      throw Error(fmt::format("the ranks differ in collective {}: rank {} calls {}, rank {} calls {}", call.sequence,
                              rank, call.text, meeting->first, meeting->text));
    meeting->parts[static_cast<std::size_t>(rank)] = std::move(part);
    std::shared_ptr<Meeting> mine = meeting;
    if (++mine->arrived == ranks_) {
      mine->ready = Clock::now() + delay_;
      meetings_.erase(call.sequence);
    }
    changed();
    return mine;
  }
  bool ready(const Meeting& meeting) {
    const std::lock_guard lock(mutex_);
    return meeting.arrived == ranks_ && Clock::now() >= meeting.ready;
  }

  void send(int from, int to, std::string message) {
    const std::lock_guard lock(mutex_);
    inboxes_[static_cast<std::size_t>(to)].emplace_back(from, std::move(message));
    changed();
  }
  bool receive(int rank, int& from, std::string& message) {
    const std::lock_guard lock(mutex_);
    auto& inbox = inboxes_[static_cast<std::size_t>(rank)];
    if (inbox.empty()) return false;
    from = inbox.front().first;
    message = std::move(inbox.front().second);
    inbox.pop_front();
    return true;
  }

  void end(int rank) {
    const std::lock_guard lock(mutex_);
    ended_[static_cast<std::size_t>(rank)] = true;
    changed();
  }
  bool ended(int rank) {
    const std::lock_guard lock(mutex_);
    return ended_[static_cast<std::size_t>(rank)];
  }
  // The first rank's failure is the run's; what follows from it comes later.
  void fail(std::exception_ptr error, bool of_another_rank) {
    const std::lock_guard lock(mutex_);
    if (!error_ || (error_follows_ && !of_another_rank)) {
      error_ = std::move(error);
      error_follows_ = of_another_rank;
    }
  }
  std::exception_ptr error() const { return error_; }  // after the threads' end

  // Until something changes after `seen`, or a moment has passed.
  void idle(std::uint64_t& seen) {
    std::unique_lock lock(mutex_);
    changes_.wait_for(lock, kMoment, [&] { return version_ != seen; });
    seen = version_;
  }

 private:
  static constexpr std::chrono::microseconds kMoment{500};

  void changed() {
    ++version_;
    changes_.notify_all();
  }

  const int ranks_;
  const std::chrono::microseconds delay_;
  std::mutex mutex_;
  std::condition_variable changes_;
  std::uint64_t version_ = 0;
  std::map<std::int64_t, std::shared_ptr<Meeting>> meetings_;  // at which not all have arrived
  std::vector<std::deque<std::pair<int, std::string>>> inboxes_;
  std::vector<bool> ended_;
  std::exception_ptr error_;
  bool error_follows_ = false;
};

Bytes copy_of(const void* data, std::size_t bytes) {
  Bytes copy(bytes);
  if (bytes > 0) std::memcpy(copy.data(), data, bytes);
  return copy;
}

// One rank's side of the collectives it takes part in.
struct Side {
  Hub& hub;
  int rank, ranks;
  std::int64_t started = 0, delivered = 0;
};

class SimTransfer : public Transfer {
 public:
  SimTransfer(Side& side, std::shared_ptr<Meeting> meeting)
      : side_(side), meeting_(std::move(meeting)), turn_(side.started++) {}
  // In the order of the starts: two sums into the same place must not change places.
  TransferProgress poll() override {
    if (turn_ != side_.delivered || !side_.hub.ready(*meeting_)) return TransferProgress::None;
    deliver();
    ++side_.delivered;
    return TransferProgress::Done;
  }

 protected:
  const Bytes& part(int r) const { return meeting_->parts[static_cast<std::size_t>(r)]; }
  int ranks() const { return side_.ranks; }
  int rank() const { return side_.rank; }
  static void check_unchanged(const void* now, const std::byte* then, std::size_t bytes) {
    check(bytes == 0 || std::memcmp(now, then, bytes) == 0,
          "the contribution of this rank was changed before the collective's end");
  }

 private:
  virtual void deliver() = 0;

  Side& side_;
  std::shared_ptr<Meeting> meeting_;
  std::int64_t turn_;
};

class SimGather final : public SimTransfer {
 public:
  SimGather(Side& side, std::shared_ptr<Meeting> meeting, std::span<const GatherBuffer> buffers)
      : SimTransfer(side, std::move(meeting)), buffers_(buffers.begin(), buffers.end()) {}

 private:
  void deliver() override {
    std::size_t offset = 0;
    for (const GatherBuffer& b : buffers_) {
      const std::size_t bytes = static_cast<std::size_t>(b.shard) * size_of(b.dtype);
      for (int r = 0; r < ranks() && bytes > 0; ++r) {
        std::byte* to = static_cast<std::byte*>(b.full) + static_cast<std::size_t>(r) * bytes;
        if (r == rank())
          check_unchanged(to, part(r).data() + offset, bytes);
        else
          std::memcpy(to, part(r).data() + offset, bytes);
      }
      offset += bytes;
    }
  }
  std::vector<GatherBuffer> buffers_;
};

// Sums [begin, begin + n) of every rank's contribution.
class SimReduce final : public SimTransfer {
 public:
  SimReduce(Side& side, std::shared_ptr<Meeting> meeting, const float* mine, std::int64_t begin, std::int64_t n,
            float* out, SumInto into)
      : SimTransfer(side, std::move(meeting)), mine_(mine), begin_(begin), n_(n), out_(out), into_(into) {}

 private:
  void deliver() override {
    check_unchanged(mine_, part(rank()).data(), part(rank()).size());
    std::vector<const float*> parts;
    for (int r = 0; r < ranks(); ++r) parts.push_back(reinterpret_cast<const float*>(part(r).data()) + begin_);
    sum_in_rank_order(parts, n_, out_, into_);
  }
  const float* mine_;
  std::int64_t begin_, n_;
  float* out_;
  SumInto into_;
};

class SimTransport final : public Transport {
 public:
  SimTransport(Hub& hub, int rank, int ranks) : side_{hub, rank, ranks} {}

  std::unique_ptr<Transfer> all_gather(std::span<const GatherBuffer> buffers, const TransferCall& call) override {
    Bytes mine;
    for (const GatherBuffer& b : buffers) {
      const std::size_t bytes = static_cast<std::size_t>(b.shard) * size_of(b.dtype);
      const std::byte* from = static_cast<const std::byte*>(b.full);
      if (bytes > 0)
        mine.insert(mine.end(), from + static_cast<std::size_t>(side_.rank) * bytes,
                    from + static_cast<std::size_t>(side_.rank + 1) * bytes);
    }
    return std::make_unique<SimGather>(side_, side_.hub.arrive(side_.rank, call, std::move(mine)), buffers);
  }
  std::unique_ptr<Transfer> reduce_scatter(float* full, float* owned, std::int64_t shard,
                                           const TransferCall& call) override {
    return reduce(full, side_.rank * shard, shard, side_.ranks * shard, owned, SumInto::Add, call);
  }
  std::unique_ptr<Transfer> all_reduce(float* data, std::int64_t shard, const TransferCall& call) override {
    return reduce(data, 0, side_.ranks * shard, side_.ranks * shard, data, SumInto::Replace, call);
  }
  void send(int to, std::string message) override { side_.hub.send(side_.rank, to, std::move(message)); }
  bool receive(int& from, std::string& message) override { return side_.hub.receive(side_.rank, from, message); }
  bool delivered() override { return true; }
  bool gone(int r) override { return side_.hub.ended(r); }
  void idle(std::int64_t) override { side_.hub.idle(seen_); }

 private:
  std::unique_ptr<Transfer> reduce(const float* mine, std::int64_t begin, std::int64_t n, std::int64_t all, float* out,
                                   SumInto into, const TransferCall& call) {
    auto meeting = side_.hub.arrive(side_.rank, call, copy_of(mine, static_cast<std::size_t>(all) * sizeof(float)));
    return std::make_unique<SimReduce>(side_, std::move(meeting), mine, begin, n, out, into);
  }

  Side side_;
  std::uint64_t seen_ = 0;
};

void run_rank(Hub& hub, int rank, int ranks, const SimOptions& options,
              const std::function<void(Communicator&)>& body) {
  std::unique_ptr<Transport> transport = std::make_unique<SimTransport>(hub, rank, ranks);
  if (options.over) transport = options.over(std::move(transport), rank, ranks);
  Communicator communicator(rank, ranks, options, std::move(transport));
  try {
    body(communicator);
  } catch (const PeerFailed& e) {
    hub.fail(std::current_exception(), true);
    communicator.leave(e.what(), e.code());
  } catch (const Error& e) {
    hub.fail(std::current_exception(), e.code() == ExitCode::PeerVanished);
    communicator.leave(e.what(), e.code());
  } catch (const std::exception& e) {
    hub.fail(std::current_exception(), false);
    communicator.leave(e.what(), ExitCode::Failed);
  } catch (...) {
    hub.fail(std::current_exception(), false);
    communicator.leave("an exception of unknown type", ExitCode::Failed);
  }
  hub.end(rank);
}

}  // namespace

void run_ranks(int ranks, const SimOptions& options, const std::function<void(Communicator&)>& body) {
  check(ranks > 0, "run_ranks: {} ranks", ranks);
  Hub hub(ranks, options.delay);
  {
    std::vector<std::jthread> threads;
    for (int r = 0; r < ranks; ++r) threads.emplace_back([&, r] { run_rank(hub, r, ranks, options, body); });
  }
  if (hub.error()) std::rethrow_exception(hub.error());
}

}  // namespace regather
