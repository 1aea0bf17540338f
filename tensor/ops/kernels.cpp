#include "tensor/ops/kernels.h"

#include <array>
#include <cstdlib>
#include <string>

#include "tensor/error.h"

namespace regather {

namespace baseline {
extern const Kernels kTable;
}
#ifdef REGATHER_HAS_AVX2
namespace avx2 {
extern const Kernels kTable;
}
#endif
#ifdef REGATHER_HAS_AVX512
namespace avx512 {
extern const Kernels kTable;
}
#endif

namespace {

constexpr std::array kBestFirst = {Isa::Avx512, Isa::Avx2, Isa::Baseline};

const Kernels& choose() {
  const char* wish = std::getenv("REGATHER_ISA");
  std::string known;
  for (const Isa isa : kBestFirst) {
    const Kernels* table = kernels_for(isa);
    if (!table) continue;
    if (!wish || wish == name_of(isa)) return *table;
    known += (known.empty() ? "" : ", ") + std::string(name_of(isa));
  }
  throw UsageError(
      fmt::format("environment variable REGATHER_ISA: \"{}\" is not available here; allowed: {}", wish, known));
}

}  // namespace

std::string_view name_of(Isa isa) {
  switch (isa) {
    case Isa::Baseline: return "baseline";
    case Isa::Avx2: return "avx2";
    case Isa::Avx512: return "avx512";
  }
  return "?";
}

const Kernels* kernels_for(Isa isa) {
  switch (isa) {
    case Isa::Baseline: return &baseline::kTable;
#ifdef REGATHER_HAS_AVX2
    case Isa::Avx2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &avx2::kTable : nullptr;
#endif
#ifdef REGATHER_HAS_AVX512
    case Isa::Avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                     __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("fma")
                 ? &avx512::kTable
                 : nullptr;
#endif
    default: return nullptr;
  }
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace regather
