// The arithmetic of the CPU operations, compiled once per instruction set (tensor/ops/kernels/*.cpp) and chosen when
// the program starts to need it: a table of functions on plain arrays. Invariants: a kernel allocates nothing, never
// throws, holds no state, and its result depends on its arguments' values alone: not on addresses, and not on the
// number of threads, since the split into pieces is the caller's and is made of sizes. Results of different instruction
// sets differ by rounding. It does not know tensors, parameters or tapes.
#pragma once
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "tensor/ops/kernel_types.h"

namespace regather {

enum class Isa { Baseline, Avx2, Avx512 };  // Baseline: what every x86-64 has (or, elsewhere, the compiler's default)

std::string_view name_of(Isa isa);

// Null if this build or this processor does not have it.
const Kernels* kernels_for(Isa isa);

// The best set that this processor has. REGATHER_ISA=baseline|avx2|avx512 asks for another one: nodes of different
// kinds can be made to give the same bits. A set that is unknown or missing here is an error, at the first use.
const Kernels& kernels();
// Of those, the ones on elements of type T: float or Bf16.
template <class T>
const ElementKernels<T>& kernels_on() {
  if constexpr (std::is_same_v<T, float>)
    return kernels().fp32;
  else
    return kernels().bf16;
}

}  // namespace regather
