// SIGTERM and SIGUSR1 ask a run to finish its step and leave. A signal has no context to hand over, so this is the one
// place with a variable of the process; it is only ever set by the handler.
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
  }, user_{};
};

}  // namespace regather
