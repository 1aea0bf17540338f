// This machine, as the system describes it: its name, its processor, and the memory it can still give.
#pragma once
#include <cstdint>
#include <string>

namespace regather {

std::string host_name();
std::string processor_name();  // "AMD EPYC 7B13"; empty: not known
// What the machine has available, or what its control group still allows if that is less; 0: not known.
std::int64_t available_memory();

}  // namespace regather
