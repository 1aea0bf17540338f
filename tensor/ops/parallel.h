// Loops over independent pieces. The pieces are made of sizes alone, so results do not depend on the number of threads.
// The number is the calling thread's OpenMP setting (omp_set_num_threads); with one, no OpenMP region is entered. A
// body must not throw.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace regather {

// Threads that a loop over n pieces uses. ThreadSanitizer cannot see OpenMP's synchronisation: one, under it.
inline int num_workers(std::int64_t n) {
#ifdef __SANITIZE_THREAD__
  return static_cast<int>(std::min<std::int64_t>(1, n));
#else
  return static_cast<int>(std::min<std::int64_t>(omp_get_max_threads(), n));
#endif
}

// f(i, worker), worker in [0, num_workers(n)).
template <class F>
void parallel_for(std::int64_t n, F f) {
  const int workers = num_workers(n);
  if (workers <= 1) {
    for (std::int64_t i = 0; i < n; ++i) f(i, 0);
    return;
  }
#pragma omp parallel for num_threads(workers) schedule(dynamic)
  for (std::int64_t i = 0; i < n; ++i) f(i, omp_get_thread_num());
}

// f(begin, end) on pieces of `grain`.
template <class F>
void parallel_blocks(std::int64_t n, std::int64_t grain, F f) {
  parallel_for((n + grain - 1) / grain, [&](std::int64_t i, int) { f(i * grain, std::min(n, (i + 1) * grain)); });
}

// Elements of an elementwise piece: large against the cost of handing it out, small against the cache.
inline constexpr std::int64_t kElementGrain = std::int64_t{1} << 16;

}  // namespace regather
