// What matrix products on a CPU (gemm.h) and on a GPU (gpu_ops.h) have in common.
#pragma once
#include <cstdint>

namespace regather {

enum class Into { Write, Add };  // Write: C may be uninitialised
// A or C may be columns of a wider matrix: elements from one of its rows to the next; 0: it is a matrix of its own.
struct RowStrides {
  std::int64_t a = 0, c = 0;
};

}  // namespace regather
