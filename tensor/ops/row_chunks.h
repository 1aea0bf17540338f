// Sums over rows into a parameter's gradient, split so that they can run in parallel and still add in one order: rows
// are cut into chunks by size alone, each chunk has partial sums of its own in the workspace, and those are added in
// order.
#pragma once
#include <algorithm>
#include <cstdint>

#include "tensor/ops/kernels.h"
#include "tensor/ops/parallel.h"

namespace regather {

struct RowChunks {
  static constexpr std::int64_t kRows = 64;  // fewer are not worth a partial sum
  static constexpr std::int64_t kMost = 64;  // more chunks are not worth their memory
  explicit RowChunks(std::int64_t n)
      : rows(n), count(std::clamp<std::int64_t>(rows / kRows, 1, kMost)), size((rows + count - 1) / count) {}
  std::int64_t bytes(std::int64_t cols) const { return count * cols * 4; }

  // f(begin, end, partial): adds rows [begin, end) to partial[0 .. cols), which is zero at first.
  template <class F>
  void add_up(float* workspace, std::int64_t cols, F f) const {
    std::fill_n(workspace, count * cols, 0.0F);
    parallel_for(count, [&](std::int64_t i, int) {
      f(std::min(rows, i * size), std::min(rows, (i + 1) * size), workspace + i * cols);
    });
  }
  // to[c] += the sum of all chunks' partial[first + c].
  void add_to(float* to, const float* workspace, std::int64_t first, std::int64_t n, std::int64_t cols) const {
    kernels_on<float>().add_column_sums(to, workspace + first, count, n, cols);
  }

  std::int64_t rows, count, size;
};

}  // namespace regather
