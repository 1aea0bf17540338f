#include "tensor/work.h"

#include <limits>

#include "tensor/memory.h"
#include "tensor/ops/gemm.h"
#include "tensor/ops/optimizer.h"

namespace regather {
namespace {

// The first execution makes code and touches memory: it does not count.
template <class F>
double best_seconds(std::chrono::duration<double> within, double (*now)(), F f) {
  f();
  double best = std::numeric_limits<double>::infinity();
  const double end = now() + within.count();
  do {
    const double begin = now();
    f();
    best = std::min(best, now() - begin);
  } while (now() < end);
  return best;
}

}  // namespace

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

MachineLimits measure_limits(std::chrono::duration<double> each, double (*now)()) {
  Allocator memory;
  constexpr std::int64_t kM = 1024, kN = 768, kK = 768, kArray = std::int64_t{64} << 20;
  const Buffer arrays(memory, 2 * kArray, Tag::Workspace);
  float *from = arrays.data<float>(), *to = from + kArray / 4;
  std::fill_n(from, kArray / 2, 1.0F);
  MachineLimits limits;
  limits.flops =
      2.0 * kM * kN * kK / best_seconds(each, now, [&] { gemm_nt(kM, kN, kK, from, from + kM * kK, to, Into::Write); });
  limits.bytes = kAccumulateBytes * (kArray / 4) / best_seconds(each, now, [&] { accumulate(to, from, kArray / 4); });
  return limits;
}

}  // namespace regather
