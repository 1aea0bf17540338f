// Which C++ type an element type of a tensor is, and how code is written once for those that operations compute on:
//   with_element(x.dtype(), [&]<class T>(Element<T>) { use(x.data<T>()); });
// It does no arithmetic.
#pragma once
#include <bit>
#include <cstdint>
#include <type_traits>

#include "tensor/bf16.h"
#include "tensor/shape.h"

namespace regather {

template <class T>
struct Element {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, Bf16> || std::is_same_v<T, std::int32_t> ||
                std::is_same_v<T, double>);
  static constexpr DType dtype = std::is_same_v<T, float>    ? DType::F32
                                 : std::is_same_v<T, Bf16>   ? DType::BF16
                                 : std::is_same_v<T, double> ? DType::F64
                                                             : DType::I32;
};

// f(Element<float>()) or f(Element<Bf16>()).
template <class F>
decltype(auto) with_element(DType dtype, F f) {
  check(dtype == DType::F32 || dtype == DType::BF16, "operations compute on fp32 and bf16, not on {}", name_of(dtype));
  return dtype == DType::F32 ? f(Element<float>()) : f(Element<Bf16>());
}

inline float to_float(Bf16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16); }

}  // namespace regather
