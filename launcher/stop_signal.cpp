#include "launcher/stop_signal.h"

namespace regather {
namespace {

volatile std::sig_atomic_t stop_requested = 0;

}  // namespace

const volatile std::sig_atomic_t* StopSignal::flag() { return &stop_requested; }

StopSignal::StopSignal() {
  stop_requested = 0;
  struct sigaction action {};
  action.sa_handler = [](int) { stop_requested = 1; };
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, &terminate_);
  sigaction(SIGUSR1, &action, &user_);
}

StopSignal::~StopSignal() {
  sigaction(SIGTERM, &terminate_, nullptr);
  sigaction(SIGUSR1, &user_, nullptr);
}

}  // namespace regather
