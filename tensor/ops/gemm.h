// Matrix products of row-major matrices: the one place that knows which library computes them. Elements are fp32 or
// bf16, each matrix its own; every product is accumulated in fp32, and a bf16 result rounded once. The result depends
// on values, sizes and the number of threads, not on addresses. Sizes may be zero. Thread-safe; threads: the caller's
// OpenMP setting; the library may split a sum over them.
#pragma once
#include <cstdint>

#include "tensor/element.h"
#include "tensor/ops/gemm_types.h"

namespace regather {

struct ConstElements {
  ConstElements(const float* x) : data(x), dtype(DType::F32) {}
  ConstElements(const Bf16* x) : data(x), dtype(DType::BF16) {}
  const void* data;
  DType dtype;
};
struct Elements {
  Elements(float* x) : data(x), dtype(DType::F32) {}
  Elements(Bf16* x) : data(x), dtype(DType::BF16) {}
  void* data;
  DType dtype;
};

// Bytes of scratch of a product of those sizes if some of its matrices are of this type; none for fp32. The product
// takes at most that much, whatever m, n and k are: bf16 is widened piece by piece.
std::int64_t gemm_scratch(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k);

void gemm_nt(std::int64_t m, std::int64_t n, std::int64_t k, ConstElements a, ConstElements b, Elements c, Into into,
             RowStrides strides = {}, float* scratch = nullptr);  // C[m,n] = A[m,k] B[n,k]^T
void gemm_nn(std::int64_t m, std::int64_t n, std::int64_t k, ConstElements a, ConstElements b, Elements c, Into into,
             RowStrides strides = {}, float* scratch = nullptr);  // C[m,n] = A[m,k] B[k,n]
void gemm_tn(std::int64_t m, std::int64_t n, std::int64_t k, ConstElements a, ConstElements b, Elements c, Into into,
             RowStrides strides = {}, float* scratch = nullptr);  // C[m,n] = A[k,m]^T B[k,n]

}  // namespace regather
