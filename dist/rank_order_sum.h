// The sum of all ranks' contributions, in rank order: ((c0 + c1) + c2) + ... . One function for every host backend, so
// that they give the same bits.
#pragma once
#include <cstdint>
#include <span>

namespace regather {

enum class SumInto { Replace, Add };

// out = sum, or out += sum (one addition, after the sum is complete). out may be one of the parts with
// SumInto::Replace.
void sum_in_rank_order(std::span<const float* const> parts, std::int64_t n, float* out, SumInto into);

}  // namespace regather
