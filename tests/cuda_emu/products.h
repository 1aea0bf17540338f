// What the products of cuBLAS and cuBLASLt compute, in stream order.
#pragma once
#include <cuda_bf16.h>
#include <library_types.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/cuda_emu/sanitizers.h"
#include "tests/cuda_emu/state.h"

namespace cuda_emu {

struct Matrix {  // column-major, as cuBLAS has it
  const void* data;
  std::int64_t rows, cols, lead;
  cudaDataType type;

  std::int64_t element_bytes() const { return type == CUDA_R_16BF ? 2 : 4; }
  std::size_t span() const {
    return rows == 0 || cols == 0 ? 0 : static_cast<std::size_t>(((cols - 1) * lead + rows) * element_bytes());
  }
  bool well_formed() const {
    return (type == CUDA_R_32F || type == CUDA_R_16BF) && lead >= std::max<std::int64_t>(1, rows);
  }
  float at(std::int64_t row, std::int64_t col) const {
    const std::int64_t i = col * lead + row;
    return type == CUDA_R_16BF ? __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i])
                               : static_cast<const float*>(data)[i];
  }
  void put(std::int64_t row, std::int64_t col, float value) const {
    const std::int64_t i = col * lead + row;
    if (type == CUDA_R_16BF)
      static_cast<__nv_bfloat16*>(const_cast<void*>(data))[i] = __float2bfloat16(value);
    else
      static_cast<float*>(const_cast<void*>(data))[i] = value;
  }
  template <class F>
  void each_column(F f) const {
    const auto bytes = static_cast<std::size_t>(rows * element_bytes());
    for (std::int64_t c = 0; c < cols; ++c)
      f(static_cast<char*>(const_cast<void*>(data)) + c * lead * element_bytes(), bytes);
  }
};

// With the summed dimension innermost: [outer, inner].
inline std::vector<float> packed(const Matrix& m, bool inner_is_rows) {
  std::vector<float> out;
  out.reserve(static_cast<std::size_t>(m.rows * m.cols));
  const std::int64_t outer = inner_is_rows ? m.cols : m.rows, inner = inner_is_rows ? m.rows : m.cols;
  for (std::int64_t o = 0; o < outer; ++o)
    for (std::int64_t i = 0; i < inner; ++i) out.push_back(inner_is_rows ? m.at(i, o) : m.at(o, i));
  return out;
}

struct Product {
  Matrix a, b, c;
  bool a_transposed, b_transposed;
  float alpha, beta;
  const void* bias = nullptr;  // a column that each column of C gets, of C's type; null: none

  void compute() const {
    State& s = state();
    const Matrix column = {bias, c.rows, 1, c.rows, c.type};
    if (bias && !s.check(bias, column.span(), "matrix product, bias")) return;
    if (!s.check(a.data, a.span(), "matrix product, A") || !s.check(b.data, b.span(), "matrix product, B") ||
        !s.check(c.data, c.span(), "matrix product, C"))
      return;
    a.each_column(will_read);
    b.each_column(will_read);
    if (bias) column.each_column(will_read);
    c.each_column(will_write);
    const std::vector<float> left = packed(a, a_transposed), right = packed(b, !b_transposed);
    const auto k = static_cast<std::size_t>(a_transposed ? a.rows : a.cols);
    for (std::int64_t j = 0; j < c.cols; ++j)
      for (std::int64_t i = 0; i < c.rows; ++i) {
        const float *x = left.data() + static_cast<std::size_t>(i) * k,
                    *y = right.data() + static_cast<std::size_t>(j) * k;
        float sum = 0;
        for (std::size_t p = 0; p < k; ++p) sum += x[p] * y[p];
        const float added = bias ? column.at(i, 0) : 0.0F;
        c.put(i, j, (beta == 0 ? alpha * sum : alpha * sum + beta * c.at(i, j)) + added);
      }
    ++s.ledger.products.calls;
    for (const Matrix* m : {&a, &b, &c}) s.ledger.products.bytes += m->rows * m->cols * m->element_bytes();
    if (bias) s.ledger.products.bytes += c.rows * c.element_bytes();
  }
};

}  // namespace cuda_emu
