#include "launcher/stop_signal.h"

#include <unistd.h>

#include <cerrno>

#include "launcher/launch_place.h"

namespace regather {
namespace {

constexpr std::size_t kStackBytes = std::size_t{64} << 10;  // registers of AVX-512, and the loader finding write()

volatile std::sig_atomic_t stop_requested = 0, speaks = 0;

void on_signal(int) {
  static constexpr char kLine[] = "regather: stopping after this step\n";
  const bool first = stop_requested == 0;
  stop_requested = 1;
  if (!first || speaks == 0) return;
  const int before = errno;
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kLine, sizeof(kLine) - 1);
  errno = before;
}

}  // namespace

const volatile std::sig_atomic_t* StopSignal::flag() { return &stop_requested; }

StopSignal::StopSignal() : stack_(kStackBytes) {
  stop_requested = 0;
  const stack_t stack{.ss_sp = stack_.data(), .ss_flags = 0, .ss_size = stack_.size()};
  sigaltstack(&stack, &stack_before_);
  speaks = launch_place().rank == 0 ? 1 : 0;
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART | SA_ONSTACK;
  sigaction(SIGTERM, &action, &terminate_);
  sigaction(SIGUSR1, &action, &user_);
  action.sa_flags |= static_cast<int>(SA_RESETHAND);  // the second Ctrl-C is for who does not want to wait
  sigaction(SIGINT, &action, &interrupt_);
}

StopSignal::~StopSignal() {
  sigaction(SIGTERM, &terminate_, nullptr);
  sigaction(SIGUSR1, &user_, nullptr);
  sigaction(SIGINT, &interrupt_, nullptr);
  sigaltstack(&stack_before_, nullptr);
}

}  // namespace regather
