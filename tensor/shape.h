// Element types and shapes. A shape has at most four dimensions; sizes are 64-bit everywhere.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "tensor/error.h"

namespace regather {

enum class DType : std::uint8_t { F32, BF16, F64, I32 };

constexpr std::size_t size_of(DType t) { return t == DType::F64 ? 8 : t == DType::BF16 ? 2 : 4; }
constexpr std::string_view name_of(DType t) {
  switch (t) {
    case DType::F32: return "fp32";
    case DType::BF16: return "bf16";
    case DType::F64: return "fp64";
    case DType::I32: return "int32";
  }
  return "?";
}

class Shape {
 public:
  static constexpr int kMaxDims = 4;
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims) : ndim_(static_cast<int>(dims.size())) {
    check(dims.size() <= kMaxDims, "a shape has at most {} dimensions, not {}", kMaxDims, dims.size());
    int i = 0;
    for (std::int64_t d : dims) {
      check(d >= 0, "a dimension of a shape is negative: {}", d);
      dims_[static_cast<std::size_t>(i++)] = d;
    }
  }
  int ndim() const { return ndim_; }
  // dim(-1) is the last one.
  std::int64_t dim(int i) const { return dims_.at(static_cast<std::size_t>(i < 0 ? ndim_ + i : i)); }
  std::int64_t numel() const {
    std::int64_t n = 1;
    for (int i = 0; i < ndim_; ++i) n *= dims_[static_cast<std::size_t>(i)];
    return n;
  }
  std::int64_t rows() const { return dim(-1) == 0 ? 0 : numel() / dim(-1); }  // all dimensions but the last
  std::int64_t cols() const { return dim(-1); }
  Shape with_last(std::int64_t n) const {
    Shape s = *this;
    s.dims_.at(static_cast<std::size_t>(ndim_ - 1)) = n;
    return s;
  }
  bool operator==(const Shape&) const = default;
  std::string to_string() const {  // "[4, 256, 384]"
    std::string text = "[";
    for (int i = 0; i < ndim_; ++i) text += (i ? ", " : "") + std::to_string(dims_[static_cast<std::size_t>(i)]);
    return text + "]";
  }

 private:
  std::array<std::int64_t, kMaxDims> dims_{};
  int ndim_ = 0;
};

}  // namespace regather
