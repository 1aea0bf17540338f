// Matrix products of dense row-major fp32 matrices: the one place that knows which library computes them. The result
// depends on values, sizes and the number of threads, not on addresses. Sizes may be zero. Thread-safe; threads: the
// caller's OpenMP setting; the library may split a sum over them.
#pragma once
#include <cstdint>

namespace regather {

enum class Into { Write, Add };  // Write: C may be uninitialised
// A or C may be columns of a wider matrix: elements from one of its rows to the next; 0: it is a matrix of its own.
struct RowStrides {
  std::int64_t a = 0, c = 0;
};

void gemm_nt(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c, Into into,
             RowStrides strides = {});  // C[m,n] = A[m,k] B[n,k]^T
void gemm_nn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c, Into into,
             RowStrides strides = {});  // C[m,n] = A[m,k] B[k,n]
void gemm_tn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c, Into into,
             RowStrides strides = {});  // C[m,n] = A[k,m]^T B[k,n]

}  // namespace regather
