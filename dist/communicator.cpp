#include "dist/communicator.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "dist/peers.h"
#include "dist/transport.h"

namespace regather {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begun) { return std::chrono::duration<double>(Clock::now() - begun).count(); }

constexpr auto kListenInterval = std::chrono::milliseconds(20);
// CUDA takes about a thousand launches ahead of a device, then it blocks the thread that launches, which could not even
// notice that another rank is gone. From one call of progress() to the next there are up to four launches.
constexpr int kMostOperationsAhead = 200;

}  // namespace

// What is going to run, in the words of messages. what: "all_gather of block 3 (forward)"; text adds the sizes.
struct Communicator::Started {
  LedgerKey key;
  std::string what, text, detail;
  std::int64_t wire_bytes;

  std::string kind() const {
    return fmt::format("{} of {} ({})", name_of(key.collective), key.unit, name_of(key.pass));
  }
  Recorder::Interval waiting() const { return {Recorder::Activity::Wait, kind(), detail}; }
};

class Communicator::InFlight final : public Event::State {
 public:
  InFlight(Communicator& communicator, Started s) : owner(&communicator), started(std::move(s)) {}

  bool done() override {
    if (!finished && owner && !owner->failure_) owner->guarded(started.what, [&] { owner->drive(this); });
    return finished;
  }
  void wait() override {
    if (finished) return;
    check(owner != nullptr, "{}: waited for after the end of its communicator", started.what);
    owner->finish(*this);
  }
  // A failed communicator's: none, so that whoever waits hears of the failure.
  Event enqueued() override { return finished || !owner || owner->failure_ ? Event() : transfer->enqueued(); }

  Communicator* owner;  // null after the communicator's end
  Started started;
  std::unique_ptr<Transfer> transfer;
  std::vector<double> scratch;  // of scalars: lives as long as the transfer may write to it
  Recorder::Time begun{};       // zero: nobody records
  bool finished = false;
};

Communicator::Communicator(int rank, int size, const CommunicatorOptions& options, std::unique_ptr<Transport> transport)
    : rank_(rank), size_(size), options_(options), transport_(std::move(transport)) {
  check(options_.chunk_bytes > 0 && options_.max_message_bytes > 0,
        "a chunk has {} bytes, a message at most {}: both must be positive", options_.chunk_bytes,
        options_.max_message_bytes);
  peers_ = std::make_unique<Peers>(*transport_, rank_, size_, options_, where_, [this] { return drive(nullptr); });
}

Communicator::~Communicator() {
  for (const Flight& flight : pending_) {
    flight->owner = nullptr;
    flight->transfer.reset();
  }
}

void Communicator::use_memory_of(Device& device) {
  try {
    transport_->use_memory_of(device, *peers_);
  } catch (const Error& e) {
    fail(e);
    throw;
  }
  if (size_ == 1) return;
  waiter_ = std::make_shared<const Device::Waiter>([this](const auto& done) { wait_for_device(done); });
  device.wait_with(waiter_);
}

std::int64_t Communicator::staging_bytes() const { return transport_->staging_bytes(); }

Communicator::Started Communicator::describe(Collective collective, const Label& label, DType dtype,
                                             std::string_view sizes, std::int64_t wire_bytes) const {
  std::string what = fmt::format("{} of {} ({})", name_of(collective), label.detail.empty() ? label.unit : label.detail,
                                 name_of(label.pass));
  std::string text = sizes.empty() ? what : fmt::format("{} [{}]", what, sizes);
  return {{collective, std::string(label.unit), label.pass, dtype},
          std::move(what),
          std::move(text),
          std::string(label.detail),
          wire_bytes};
}

// Runs communication: an error that leaves it names the collective, and ends the communicator's use.
template <class F>
void Communicator::guarded(const std::string& what, F f) {
  try {
    peers_->check();
    if (failure_) throw Error(fmt::format("this communicator has failed: {}", failure_->what()), failure_->code());
    f();
  } catch (Error& e) {
    e.add_context(what);
    fail(e);
    throw;
  }
}

void Communicator::fail(const Error& error) noexcept {
  if (!failure_) failure_ = error;
  transport_->stop();
}

// Checked mode: every rank must be about to do the same.
void Communicator::compare(std::int64_t sequence, const std::string& text) {
  const std::vector<std::string> texts = peers_->exchange(Peers::Channel::Calls, sequence, text, text);
  const auto other = std::find_if(texts.begin(), texts.end(), [&](const std::string& t) { return t != texts.front(); });
  if (other == texts.end()) return;
  throw Error(fmt::format("the ranks differ in collective {}: rank {} calls {}, rank 0 calls {}", sequence,
                          other - texts.begin(), *other, texts.front()));
}

template <class Begin>
Communicator::Flight Communicator::start(const Started& started, Begin begin) {
  const auto begun = Clock::now();
  auto flight = std::make_shared<InFlight>(*this, started);
  const Timed timed(recorder_, [&] {
    return Recorder::Interval{Recorder::Activity::Communicate, "starting", started.what};
  });
  if (recorder_) flight->begun = Recorder::now();
  guarded(started.what, [&] {
    const TransferCall call{sequence_++, started.text};
    if (options_.checked) compare(call.sequence, started.text);
    flight->transfer = begin(call, flight->scratch);
  });
  flight->finished = !flight->transfer;
  if (flight->finished)
    landed(*flight);
  else
    pending_.push_back(flight);
  ledger_.add_seconds(started.key, seconds_since(begun));
  return flight;
}

bool Communicator::give_up(const Event& event) noexcept {
  const auto* flight = dynamic_cast<const InFlight*>(event.state());
  if (!flight || flight->finished) return false;
  Communicator* owner = flight->owner;
  if (!owner || owner->failure_) return true;
  try {
    owner->fail(Error(fmt::format("{}: its memory was given back before its end", flight->started.what)));
  } catch (...) {
    owner->fail(Error("given up"));  // short: allocates nothing
  }
  return true;
}

void Communicator::landed(InFlight& flight) {
  if (!recorder_ || flight.begun == Recorder::Time{}) return;
  const Started& s = flight.started;
  recorder_->add({s.kind(), s.detail, static_cast<double>(s.wire_bytes), flight.begun, Recorder::now() - flight.begun});
}

// Polls everything in flight, oldest first. Some if anything moved; Queued if nothing could.
TransferProgress Communicator::drive(const InFlight* awaited) {
  TransferProgress most = TransferProgress::None;
  bool finished = false;
  for (const Flight& flight : pending_) {
    TransferProgress progress = TransferProgress::None;
    try {
      progress = flight->transfer->poll();
    } catch (Error& e) {
      if (flight.get() != awaited) e.add_context(flight->started.what);
      throw;
    }
    most = std::max(most, std::min(progress, TransferProgress::Some));
    if (progress != TransferProgress::Done) continue;
    flight->finished = finished = true;
    landed(*flight);
  }
  if (finished) {
    operations_ahead_ = 0;
    std::erase_if(pending_, [](const Flight& flight) {
      if (flight->finished) flight->transfer.reset();
      return flight->finished;
    });
  }
  return most;
}

void Communicator::finish(InFlight& flight) {
  const auto begun = Clock::now();
  const Timed timed(recorder_, [&] { return flight.started.waiting(); });
  guarded(flight.started.what, [&] {
    peers_->wait(flight.started.text, [&] {
      const TransferProgress progress = drive(&flight);
      return flight.finished ? TransferProgress::Done : progress;
    });
  });
  ledger_.add_seconds(flight.started.key, seconds_since(begun));
}

// What the device is at may wait for a collective, the oldest of those in flight first.
void Communicator::wait_for_device(const std::function<bool()>& done) {
  while (!done()) {
    if (failure_) {  // nothing in flight holds the device up any more
      transport_->idle(0);
    } else if (pending_.empty()) {
      peers_->wait("", [&] { return done() ? TransferProgress::Done : TransferProgress::Queued; });
    } else {
      const Flight oldest = pending_.front();
      guarded(oldest->started.what, [&] {
        peers_->wait(oldest->started.text, [&] {
          if (done()) return TransferProgress::Done;
          const TransferProgress progress = drive(oldest.get());
          return oldest->finished ? TransferProgress::Done : progress;
        });
      });
    }
  }
}

void Communicator::progress() {
  if (failure_) return;
  if (!pending_.empty()) {
    const Timed timed(recorder_, [] { return Recorder::Interval{Recorder::Activity::Communicate, "progress"}; });
    try {
      drive(nullptr);
    } catch (const Error& e) {
      fail(e);
      throw;
    }
  }
  if (!pending_.empty() && ++operations_ahead_ > kMostOperationsAhead && pending_.front()->transfer->enqueued().state())
    finish(*Flight(pending_.front()));
  // A rank that computes for long still answers where it is, and has heard of a failure when it comes to its next
  // collective.
  if (const auto now = Clock::now(); now - listened_ > kListenInterval) {
    listened_ = now;
    peers_->listen();
  }
}

Event Communicator::all_gather(std::span<const GatherBuffer> buffers, const Label& label) {
  check(!buffers.empty(), "all_gather of {}: no buffers", label.unit);
  std::vector<std::string> sizes;
  for (const GatherBuffer& b : buffers) {
    check(b.shard >= 0 && (b.full || b.shard == 0 || !transport_->moves_data()),
          "all_gather of {}: a buffer at {} with a shard of {} elements", label.unit, b.full, b.shard);
    sizes.push_back(fmt::format("{} x {}", name_of(b.dtype), size_ * b.shard));
  }
  Ledger::Entries entries;
  std::int64_t wire_bytes = 0;
  for (const GatherBuffer& b : buffers) {
    LedgerKey key{Collective::AllGather, std::string(label.unit), label.pass, b.dtype};
    const std::int64_t bytes = b.shard * static_cast<std::int64_t>(size_of(b.dtype));
    LedgerCounts& counts = entries[key];
    counts.count = 1;
    counts.logical_bytes += size_ * bytes;
    counts.wire_bytes += (size_ - 1) * bytes;
    wire_bytes += (size_ - 1) * bytes;
  }
  for (const auto& [key, counts] : entries) ledger_.add(key, counts);
  const Started started = describe(Collective::AllGather, label, buffers.front().dtype,
                                   fmt::format("{}", fmt::join(sizes, ", ")), wire_bytes);
  return Event(start(started, [&](const TransferCall& call, auto&) { return transport_->all_gather(buffers, call); }));
}

Event Communicator::reduce_scatter(float* full, float* owned, std::int64_t shard, const Label& label) {
  check(shard >= 0 && ((full && owned) || shard == 0 || !transport_->moves_data()),
        "reduce_scatter of {}: null buffers with a shard of {} elements", label.unit, shard);
  const std::int64_t bytes = shard * static_cast<std::int64_t>(sizeof(float));
  const Started started = describe(Collective::ReduceScatter, label, DType::F32,
                                   fmt::format("fp32 x {}", size_ * shard), (size_ - 1) * bytes);
  ledger_.add(started.key, {.count = 1, .logical_bytes = size_ * bytes, .wire_bytes = started.wire_bytes});
  return Event(start(
      started, [&](const TransferCall& call, auto&) { return transport_->reduce_scatter(full, owned, shard, call); }));
}

Event Communicator::all_reduce(float* data, std::int64_t shard, const Label& label) {
  check(shard >= 0 && (data || shard == 0 || !transport_->moves_data()),
        "all_reduce of {}: a null buffer with a shard of {} elements", label.unit, shard);
  const std::int64_t bytes = shard * static_cast<std::int64_t>(sizeof(float));
  const Started started = describe(Collective::AllReduce, label, DType::F32, fmt::format("fp32 x {}", size_ * shard),
                                   2 * (size_ - 1) * bytes);
  ledger_.add(started.key, {.count = 1, .logical_bytes = size_ * bytes, .wire_bytes = started.wire_bytes});
  return Event(
      start(started, [&](const TransferCall& call, auto&) { return transport_->all_reduce(data, shard, call); }));
}

void Communicator::all_reduce(std::span<double> values, const Label& label) {
  const std::size_t n = values.size();
  const std::int64_t bytes = static_cast<std::int64_t>(n * sizeof(double));
  const Started started =
      describe(Collective::AllReduce, label, DType::F64, fmt::format("fp64 x {}", n), (size_ - 1) * bytes);
  ledger_.add(started.key, {.count = 1, .logical_bytes = bytes, .wire_bytes = started.wire_bytes});
  const Flight flight = start(started, [&](const TransferCall& call, std::vector<double>& all) {
    all.resize(n * static_cast<std::size_t>(size_));
    std::copy(values.begin(), values.end(), all.begin() + static_cast<std::ptrdiff_t>(n) * rank_);
    const GatherBuffer buffer{all.data(), static_cast<std::int64_t>(n), DType::F64};
    return transport_->all_gather_scalars(buffer, call);
  });
  flight->wait();
  for (std::size_t i = 0; i < n; ++i) {
    double sum = flight->scratch[i];
    for (std::size_t r = 1; r < static_cast<std::size_t>(size_); ++r) sum += flight->scratch[r * n + i];
    values[i] = sum;
  }
}

void Communicator::barrier(const Label& label) {
  const auto begun = Clock::now();
  const Started started = describe(Collective::Barrier, label, DType::I32, "", 0);
  const Timed timed(recorder_, [&] { return started.waiting(); });
  ledger_.add(started.key, {.count = 1});
  guarded(started.what, [&] { compare(sequence_++, started.text); });
  ledger_.add_seconds(started.key, seconds_since(begun));
}

std::vector<std::string> Communicator::exchange(const std::string& mine) {
  const std::string what = "exchange of texts";
  std::vector<std::string> texts;
  guarded(what, [&] {
    if (options_.checked) compare(sequence_++, what);
    texts = peers_->exchange(Peers::Channel::Texts, exchanges_++, mine, what);
  });
  return texts;
}

std::vector<std::string> Communicator::collect(const std::string& mine) {
  const std::string what = "collection of texts";
  std::vector<std::string> texts;
  guarded(what, [&] {
    if (options_.checked) compare(sequence_++, what);
    texts = peers_->collect(Peers::Channel::Texts, exchanges_++, mine, what);
  });
  return texts;
}

void Communicator::leave(std::string_view reason, ExitCode code) noexcept {
  if (!failure_) failure_.emplace("it was left", code);  // short: allocates nothing
  peers_->leave(reason, code);
}

}  // namespace regather
