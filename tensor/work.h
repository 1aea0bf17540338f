// How much there is to do, how fast this machine could do it, and so how long it takes at least. Limits are measured
// with the calling thread's OpenMP setting; ranks that share a machine measure together, or each gets what it would
// have alone. It measures nothing else, and keeps no result.
#pragma once
#include <algorithm>
#include <chrono>

namespace regather {

struct Work {
  double flops = 0, bytes = 0;  // bytes: that have to move, what is read or written counted once
};
struct MachineLimits {
  double flops = 0, bytes = 0;  // a second
};

enum class LimitedBy { Flops, Bytes };
inline LimitedBy limited_by(const Work& work, const MachineLimits& limits) {
  return work.flops * limits.bytes > work.bytes * limits.flops ? LimitedBy::Flops : LimitedBy::Bytes;
}
inline double least_seconds(const Work& work, const MachineLimits& limits) {
  return limits.flops > 0 && limits.bytes > 0 ? std::max(work.flops / limits.flops, work.bytes / limits.bytes) : 0;
}

// flops: of a large matrix product; bytes: of adding one array to another, both too large for the caches. Each is the
// best of as many repetitions as begin within `each`, at least one. now: seconds.
MachineLimits measure_limits(std::chrono::duration<double> each, double (*now)());
double steady_seconds();

}  // namespace regather
