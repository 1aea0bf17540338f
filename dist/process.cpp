#include "dist/process.h"

#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <string>

namespace regather {

Process look_up_process(std::int64_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  if (!std::getline(file, line)) return {};
  const std::size_t name_end = line.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= line.size()) return {};
  char state = '?';
  Process process{pid, 0};
  constexpr const char* kFields = " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu";
  if (std::sscanf(line.c_str() + name_end + 1, kFields, &state, &process.start) != 2) return {};
  return state == 'Z' || state == 'X' ? Process{} : process;
}

}  // namespace regather
