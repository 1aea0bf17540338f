// Entry checks that operations share; every message shows both sides.
#pragma once
#include <span>
#include <string_view>

#include "tensor/op.h"

namespace regather {

inline void check_counts(std::string_view op, std::span<const ValueType> in, std::size_t inputs,
                         std::span<const Shape> params, std::size_t num_params) {
  check(in.size() == inputs && params.size() == num_params, "{}: takes {} inputs and {} parameters, got {} and {}", op,
        inputs, num_params, in.size(), params.size());
}
inline void check_dtype(std::string_view op, std::string_view what, const ValueType& x, DType want) {
  check(x.dtype == want, "{}: {} must be {}, is {}", op, what, name_of(want), name_of(x.dtype));
}
inline void check_ndim(std::string_view op, std::string_view what, const ValueType& x, int least_ndim) {
  check(x.shape.ndim() >= least_ndim, "{}: {} must have at least {} dimensions, is {}", op, what, least_ndim,
        x.shape.to_string());
}
// For an operation that computes on fp32 alone.
inline void check_fp32(std::string_view op, std::string_view what, const ValueType& x, int least_ndim = 1) {
  check_dtype(op, what, x, DType::F32);
  check_ndim(op, what, x, least_ndim);
}
// For one that computes on any element type that a run can have.
inline void check_real(std::string_view op, std::string_view what, const ValueType& x, int least_ndim = 1) {
  check(x.dtype == DType::F32 || x.dtype == DType::BF16, "{}: {} must be fp32 or bf16, is {}", op, what,
        name_of(x.dtype));
  check_ndim(op, what, x, least_ndim);
}
// A parameter of one value a channel.
inline void check_channels(std::string_view op, std::string_view what, const Shape& param, const Shape& x) {
  check(param == Shape{x.cols()}, "{}: {} is {}, x is {} with C = {}", op, what, param.to_string(), x.to_string(),
        x.cols());
}
inline void check_same(std::string_view op, std::string_view a_name, const ValueType& a, std::string_view b_name,
                       const ValueType& b) {
  check(a.shape == b.shape, "{}: {} is {}, {} is {}", op, a_name, a.shape.to_string(), b_name, b.shape.to_string());
  check(a.dtype == b.dtype, "{}: {} is {}, {} is {}", op, a_name, name_of(a.dtype), b_name, name_of(b.dtype));
}

}  // namespace regather
