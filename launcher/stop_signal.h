// SIGINT, SIGTERM and SIGUSR1 ask a run to finish its step and leave; rank 0 says at once that it was heard. A second
// SIGINT ends the process as if there were no handler. A signal has no context to hand over, so this is the one place
// with variables of the process.
#pragma once
#include <csignal>

namespace regather {

// Installs the handlers while it lives, and puts back what was there.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;
  bool received() const { return *flag() != 0; }
  static const volatile std::sig_atomic_t* flag();

 private:
  struct sigaction terminate_ {
  }, user_{}, interrupt_{};
};

}  // namespace regather
