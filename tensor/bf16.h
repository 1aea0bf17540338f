// A bfloat16 number: the upper half of an fp32 one. It is only stored: whoever computes widens it to fp32 (exact), and
// rounds what is stored to nearest, ties to even; NaN stays NaN. Kernels of several instruction sets include this
// header, so it must stay free of inline functions (see tensor/ops/kernel_types.h).
#pragma once
#include <cstdint>

namespace regather {

enum class Bf16 : std::uint16_t {};

}  // namespace regather
