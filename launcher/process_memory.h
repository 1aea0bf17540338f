// What the kernel says of this process's memory. Bytes; 0 where /proc is not there.
#pragma once
#include <cstdint>

namespace regather {

std::int64_t resident_bytes();       // VmRSS
std::int64_t peak_resident_bytes();  // VmHWM
void reset_peak_resident();          // the high-water mark starts again at what is resident now

}  // namespace regather
