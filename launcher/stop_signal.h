// SIGINT, SIGTERM and SIGUSR1 ask a run to finish its step and leave; rank 0 says at once that it was heard. A second
// SIGINT ends the process as if there were no handler. A signal has no context to hand over, so this is the one place
// with variables of the process. The handler has a stack of its own: kernels of a matrix library may use the stack
// pointer for data of theirs, and a signal that arrives meanwhile would write over the heap.
#pragma once
#include <csignal>
#include <vector>

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
  std::vector<char> stack_;  // of the thread that makes this; the system prefers a process's first thread
  stack_t stack_before_{};
};

}  // namespace regather
