// What a rank knows of the others, and how it waits: the one polling loop of the project. It notices that another rank
// left (PeerFailed), that one is gone or that nothing moves (an Error with both sides: who waits where), and tells the
// others when this rank leaves. Invariant: every wait ends: by completion, by a peer's message, or by the timeout.
// Messages carry no data of a step.
#pragma once
#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dist/transport.h"

namespace regather {

class Peers {
 public:
  using Poll = std::function<TransferProgress()>;

  // where: the rank's own "step 120", read when it is asked for. drive: polls the collectives in flight, which others
  // may be waiting for while this rank waits for texts.
  Peers(Transport& transport, int rank, int size, const CommunicatorOptions& options, const std::string& where,
        Poll drive)
      : transport_(transport),
        options_(options),
        where_(where),
        drive_(std::move(drive)),
        rank_(rank),
        size_(size),
        others_(static_cast<std::size_t>(size)) {}

  // Polls until Done. doing: "all_gather of block 3 (forward)".
  // needs: whether that rank's end makes the wait hopeless; without it, any rank's does.
  using Needs = std::function<bool(int rank)>;
  void wait(std::string_view doing, const Poll& poll, const Needs& needs = {});
  // Throws PeerFailed if another rank has left.
  void check();
  // Reads messages that have arrived, and answers questions; throws nothing about other ranks.
  void listen();
  // One text of every rank, in rank order; sequence numbers the exchanges of a channel.
  enum class Channel : char { Texts = 'x', Calls = 'c', Devices = 'd' };
  std::vector<std::string> exchange(Channel channel, std::int64_t sequence, const std::string& mine,
                                    std::string_view doing);
  // The same on rank 0 alone; empty on the others.
  std::vector<std::string> collect(Channel channel, std::int64_t sequence, const std::string& mine,
                                   std::string_view doing);
  // Tells the others, and waits until each has said the same or is gone; at most 5 s.
  void leave(std::string_view reason, ExitCode code) noexcept;

 private:
  struct Left {
    int origin;
    ExitCode code;
    std::string reason;
  };
  struct Other {
    std::optional<Left> left;
    bool parted = false;                     // knows that all have left
    std::optional<std::string> whereabouts;  // its answer to this rank's question
    bool silent = false;                     // did not answer: not waited for again
    std::map<std::pair<char, std::int64_t>, std::string> texts;
  };
  using Clock = std::chrono::steady_clock;

  Other& other(int r) { return others_[static_cast<std::size_t>(r)]; }
  template <class F>
  void for_others(F f) {
    for (int r = 0; r < size_; ++r)
      if (r != rank_) f(r, other(r));
  }
  void take(int from, const std::string& message);
  std::vector<std::string> texts_of_all(const std::pair<char, std::int64_t>& key, const std::string& mine,
                                        std::string_view doing);
  std::string here() const;
  void ask_where(Clock::duration patience);
  template <class Heard>
  bool hear_from_all(Clock::time_point deadline, Heard heard);
  std::string standstill(Clock::duration waited, Clock::duration patience);
  void watch(Clock::time_point moved, const Needs& needs);

  Transport& transport_;
  const CommunicatorOptions& options_;
  const std::string& where_;
  const Poll drive_;
  int rank_, size_;
  std::vector<Other> others_;
  std::string_view doing_;    // of the wait that is going on
  bool warned_ = false;       // of an interrupt, in the wait that is going on
  std::optional<int> first_;  // the rank whose leaving was noticed first
};

}  // namespace regather
