// How a run ended on each of its ranks, in words.
#pragma once
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "dist/communicator.h"
#include "tests/message_of.h"

namespace regather::conformance {

struct Outcome {
  std::vector<std::string> texts;
  std::vector<ExitCode> codes;
  std::vector<int> failed_peer;  // -1: not a PeerFailed
  std::string thrown;            // by the run
  double seconds = 0;

  // run: on its ranks, each of which calls note(rank, what it does).
  using Note = std::function<void(int rank, const std::function<void()>&)>;
  Outcome(int ranks, const std::function<void(const Note&)>& run) {
    const auto n = static_cast<std::size_t>(ranks);
    texts.resize(n);
    codes.resize(n, ExitCode::Done);
    failed_peer.resize(n, -1);
    const auto begun = std::chrono::steady_clock::now();
    try {
      run([&](int rank, const std::function<void()>& body) { note(static_cast<std::size_t>(rank), body); });
    } catch (const std::exception& e) {
      thrown = e.what();
    }
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  }

 private:
  void note(std::size_t rank, const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& e) {
      texts[rank] = e.what();
      codes[rank] = e.code();
      if (const auto* peer = dynamic_cast<const PeerFailed*>(&e)) failed_peer[rank] = peer->rank();
      throw;
    }
  }
};

}  // namespace regather::conformance
