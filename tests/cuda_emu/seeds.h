// How many schedules a test tries: as many as it says by itself, times REGATHER_CUDA_SEEDS. ThreadSanitizer sees a
// missing order under every schedule, so there a test needs few.
#pragma once
#include <cstdlib>
#include <string>

namespace cuda_emu::testing {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kSeesRaces = true;
#else
inline constexpr bool kSeesRaces = false;
#endif

#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSeesAddresses = true;
#else
inline constexpr bool kSeesAddresses = false;
#endif

inline int seeds(int by_itself) {
  const char* factor = std::getenv("REGATHER_CUDA_SEEDS");
  return factor ? by_itself * std::stoi(factor) : by_itself;
}

}  // namespace cuda_emu::testing
