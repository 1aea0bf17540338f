// A process of this machine, recognised by its number and its start time, which no later process shares.
// It sees what /proc shows: a process of another container may be running and yet not be found.
#pragma once
#include <cstdint>

namespace regather {

struct Process {
  std::int64_t pid = 0;
  unsigned long long start = 0;
  bool operator==(const Process&) const = default;
};

// Empty if there is no such process, or nothing of it but its exit status.
Process look_up_process(std::int64_t pid);

}  // namespace regather
