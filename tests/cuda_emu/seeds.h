// How many schedules a test tries: as many as it says by itself, times REGATHER_CUDA_SEEDS.
#pragma once
#include <cstdlib>
#include <string>

namespace cuda_emu::testing {

inline int seeds(int by_itself) {
  const char* factor = std::getenv("REGATHER_CUDA_SEEDS");
  return factor ? by_itself * std::stoi(factor) : by_itself;
}

}  // namespace cuda_emu::testing
