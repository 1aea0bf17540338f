#include "dist/peers.h"

#include <algorithm>
#include <cstring>

namespace regather {
namespace {

using namespace std::chrono_literals;

constexpr auto kLeaveTimeout = 5s;
constexpr auto kAnswerTimeout = 1s;
constexpr auto kInterruptGrace = 300ms;  // mpirun follows SIGTERM by SIGKILL after 1 s
constexpr auto kInterruptAnswer = 200ms;
constexpr auto kGoneGrace = 200ms;  // what a rank sent before it ended may still arrive
constexpr auto kWatchInterval = 20ms;
constexpr int kPollsPerListen = 16;
constexpr std::size_t kLongestReason = 3000;  // so that the message goes without an answer of the receiver's library

// Wire form of a message: the header's bytes, then the text. All ranks run the same program.
enum class Kind : char { Leave = 'l', Parted = 'p', Ask = 'a', Answer = 'w' };  // or a Peers::Channel
struct Header {
  std::int64_t sequence;
  std::int32_t origin, code;
  char kind;
  char unused[7];
};

std::string pack(char kind, std::int64_t sequence, int origin, int code, std::string_view text) {
  const Header header{sequence, origin, code, kind, {}};
  std::string message(sizeof header + text.size(), '\0');
  std::memcpy(message.data(), &header, sizeof header);
  std::memcpy(message.data() + sizeof header, text.data(), text.size());
  return message;
}

double seconds(std::chrono::steady_clock::duration d) { return std::chrono::duration<double>(d).count(); }

}  // namespace

PeerFailed::PeerFailed(int rank, std::string reason, ExitCode code)
    : Error(fmt::format("rank {} left: {}", rank, reason), code), rank_(rank), reason_(std::move(reason)) {}

std::string Peers::here() const {
  const std::string step = where_.empty() ? "" : fmt::format("at {}, ", where_);
  return doing_.empty() ? step + "in no collective" : fmt::format("{}in {}", step, doing_);
}

void Peers::take(int from, const std::string& message) {
  Header header;
  regather::check(message.size() >= sizeof header, "a message of {} bytes from rank {} is no message of Regather",
                  message.size(), from);
  std::memcpy(&header, message.data(), sizeof header);
  std::string text = message.substr(sizeof header);
  Other& sender = other(from);
  switch (header.kind) {
    case static_cast<char>(Kind::Leave):
      if (!sender.left) sender.left = Left{header.origin, static_cast<ExitCode>(header.code), std::move(text)};
      if (!first_) first_ = from;
      break;
    case static_cast<char>(Kind::Parted): sender.parted = true; break;
    case static_cast<char>(Kind::Ask):
      transport_.send(from, pack(static_cast<char>(Kind::Answer), 0, rank_, 0, here()));
      sender.whereabouts = std::move(text);
      break;
    case static_cast<char>(Kind::Answer): sender.whereabouts = std::move(text); break;
    default: sender.texts[{header.kind, header.sequence}] = std::move(text);
  }
}

void Peers::listen() {
  int from = 0;
  std::string message;
  while (transport_.receive(from, message)) take(from, message);
}

void Peers::check() {
  listen();
  if (!first_) return;
  const Left& left = *other(*first_).left;
  throw PeerFailed(left.origin, left.reason, left.code);
}

// One line for both sides of a wait: where this rank is, and where every other rank says it is.
std::string Peers::standstill(Clock::duration waited, Clock::duration patience) {
  ask_where(patience);
  std::string line = fmt::format("no progress for {:.1f} s: rank {} is {}", seconds(waited), rank_, here());
  for_others([&](int r, Other& o) {
    if (transport_.gone(r)) {
      line += fmt::format("; rank {} is gone", r);
    } else if (o.whereabouts) {
      line += fmt::format("; rank {} is {}", r, *o.whereabouts);
    } else {
      line += fmt::format("; rank {} gives no answer", r);
    }
  });
  return line;
}

void Peers::ask_where(Clock::duration patience) {
  for_others([&](int r, Other& o) {
    o.whereabouts.reset();
    if (transport_.gone(r)) return;  // a send to an ended process may block in the library
    transport_.send(r, pack(static_cast<char>(Kind::Ask), 0, rank_, 0, here()));
  });
  const auto deadline = Clock::now() + patience;
  for (std::int64_t round = 0; Clock::now() < deadline; ++round) {
    listen();
    bool all = true;
    for_others([&](int r, Other& o) { all = all && (o.whereabouts || o.left || transport_.gone(r)); });
    if (all) return;
    transport_.idle(round);
  }
}

// Looks for reasons to give up a wait in which nothing has moved since `moved`.
void Peers::watch(Clock::time_point moved, const Needs& needs) {
  const auto still = Clock::now() - moved;
  bool someone_gone = false;
  if (still > kGoneGrace)
    for_others([&](int r, Other&) { someone_gone = someone_gone || (transport_.gone(r) && (!needs || needs(r))); });
  if (someone_gone || still > options_.timeout) {
    std::string line = standstill(still, someone_gone ? kInterruptAnswer : kAnswerTimeout);
    check();  // one that left in order has told more
    for_others([&](int, Other& o) { o.silent = !o.whereabouts; });
    throw Error(std::move(line), ExitCode::PeerVanished);
  }
  if (!warned_ && options_.interrupt && *options_.interrupt && still > kInterruptGrace) {
    warned_ = true;
    const std::string line = standstill(still, kInterruptAnswer);
    if (options_.warn) options_.warn(line);
  }
}

void Peers::wait(std::string_view doing, const Poll& poll, const Needs& needs) {
  if (poll() == TransferProgress::Done) return;
  struct Doing {
    Doing(std::string_view& now, std::string_view what) : now_(now) { now_ = what; }
    ~Doing() { now_ = {}; }
    std::string_view& now_;
  } const stated(doing_, doing);
  warned_ = false;
  auto moved = Clock::now(), watched = moved;
  for (std::int64_t round = 0;; ++round) {
    const TransferProgress progress = poll();
    if (progress == TransferProgress::Done) return;
    if (progress == TransferProgress::Some) {
      moved = Clock::now();
      round = 0;
      continue;
    }
    if (progress == TransferProgress::Queued) moved = Clock::now();
    if (round % kPollsPerListen == kPollsPerListen - 1) {
      check();
      const auto now = Clock::now();
      if (now - watched > kWatchInterval) {
        watched = now;
        watch(moved, needs);
      }
    }
    transport_.idle(round);
  }
}

std::vector<std::string> Peers::exchange(Channel channel, std::int64_t sequence, const std::string& mine,
                                         std::string_view doing) {
  const std::pair<char, std::int64_t> key{static_cast<char>(channel), sequence};
  for_others([&](int r, Other&) { transport_.send(r, pack(key.first, sequence, rank_, 0, mine)); });
  return texts_of_all(key, mine, doing);
}

std::vector<std::string> Peers::collect(Channel channel, std::int64_t sequence, const std::string& mine,
                                        std::string_view doing) {
  const std::pair<char, std::int64_t> key{static_cast<char>(channel), sequence};
  if (rank_ == 0) return texts_of_all(key, mine, doing);
  transport_.send(0, pack(key.first, sequence, rank_, 0, mine));
  wait(doing, [&] {
    listen();
    return transport_.delivered() ? TransferProgress::Done : drive_();
  });
  return {};
}

std::vector<std::string> Peers::texts_of_all(const std::pair<char, std::int64_t>& key, const std::string& mine,
                                             std::string_view doing) {
  // A rank that handed in its text and has nothing to fetch may end while others are still at work.
  const auto needs = [&](int r) { return !other(r).texts.contains(key) || !transport_.delivered(); };
  const auto all_here = [&] {
    listen();
    bool all = true;
    for_others([&](int, Other& o) { all = all && o.texts.contains(key); });
    return all && transport_.delivered() ? TransferProgress::Done : drive_();
  };
  wait(doing, all_here, needs);
  std::vector<std::string> texts(static_cast<std::size_t>(size_), mine);
  for_others([&](int r, Other& o) { texts[static_cast<std::size_t>(r)] = std::move(o.texts.extract(key).mapped()); });
  return texts;
}

// True when `heard` holds for every other rank; false once it does for all that can still speak, or after the deadline.
template <class Heard>
bool Peers::hear_from_all(Clock::time_point deadline, Heard heard) {
  for (std::int64_t round = 0; Clock::now() < deadline; ++round) {
    listen();
    bool all = true, all_speaking = true;
    for_others([&](int r, Other& o) {
      if (heard(o)) return;
      all = false;
      all_speaking = all_speaking && (o.silent || transport_.gone(r));
    });
    if (all && transport_.delivered()) return true;
    if (!all && all_speaking) return false;
    transport_.idle(round);
  }
  return false;
}

void Peers::leave(std::string_view reason, ExitCode code) noexcept {
  try {
    transport_.abandon();
    Left left{rank_, code, std::string(reason)};
    if (first_) left = *other(*first_).left;  // not this rank's own failure: name the rank that began it
    left.reason.resize(std::min(left.reason.size(), kLongestReason));
    const auto tell = [&](Kind kind) {
      for_others([&](int r, Other&) {
        if (transport_.gone(r)) return;
        transport_.send(r, pack(static_cast<char>(kind), 0, left.origin, static_cast<int>(left.code), left.reason));
      });
    };
    const auto deadline = Clock::now() + kLeaveTimeout;
    tell(Kind::Leave);
    if (!hear_from_all(deadline, [](const Other& o) { return o.left.has_value(); })) return;
    // All know. Only when all know that all know does nobody wait for a rank that has given up waiting.
    tell(Kind::Parted);
    if (hear_from_all(deadline, [](const Other& o) { return o.parted; })) transport_.end_together();
  } catch (...) {
    // Leaving already, for a reason that is told elsewhere.
  }
}

}  // namespace regather
