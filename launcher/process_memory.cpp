#include "launcher/process_memory.h"

#include <fstream>
#include <string>

namespace regather {
namespace {

std::int64_t status_field(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (word == name) {
      std::int64_t kib = 0;
      status >> kib;
      return kib * 1024;
    }
  return 0;
}

}  // namespace

std::int64_t resident_bytes() { return status_field("VmRSS:"); }
std::int64_t peak_resident_bytes() { return status_field("VmHWM:"); }
void reset_peak_resident() { std::ofstream("/proc/self/clear_refs") << "5"; }

}  // namespace regather
