#include "launcher/machine.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace regather {
namespace {

// The number in a file of one; -1: there is none ("max", no such file).
std::int64_t number_in(const char* file) {
  std::ifstream stream(file);
  std::int64_t value = -1;
  return stream >> value ? value : -1;
}

// Counted as used by a control group, but given up when memory is wanted.
std::int64_t cached_files(const char* statistics) {
  std::ifstream stream(statistics);
  std::int64_t bytes = 0, value = 0;
  for (std::string name; stream >> name >> value;)
    if (name == "active_file" || name == "inactive_file") bytes += value;
  return bytes;
}

}  // namespace

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

std::string processor_name() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);)
    if (const std::size_t colon = line.find(": "); line.starts_with("model name") && colon != std::string::npos)
      return line.substr(colon + 2);
  return "";
}

std::int64_t available_memory() {
  std::int64_t available = 0;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string name; meminfo >> name;) {
    std::int64_t kib = 0;
    if (name == "MemAvailable:" && meminfo >> kib) available = kib * 1024;
    meminfo.ignore(4096, '\n');
  }
  struct Group {
    const char *limit, *used, *statistics;
  };
  static constexpr Group kGroups[] = {
      {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"},
      {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes",
       "/sys/fs/cgroup/memory/memory.stat"}};
  for (const Group& group : kGroups) {
    const std::int64_t limit = number_in(group.limit), used = number_in(group.used);
    if (limit <= 0 || used < 0) continue;
    available = std::min(available, std::max<std::int64_t>(limit - used + cached_files(group.statistics), 1));
  }
  return available;
}

}  // namespace regather
