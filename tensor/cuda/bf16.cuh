// bf16 in kernels: numbers are widened to fp32 when they are loaded (exactly) and rounded when they are stored; and
// what tensor cores do with them, a warp at a time. Beside launch.cuh the only file that tells the device's compiler
// from the emulator's. Fragments are those of mma.m16n8k16: with g = lane / 4 and c = 2 (lane % 4),
//   A [16, 16]   registers (g, c), (g + 8, c), (g, c + 8), (g + 8, c + 8), two columns each
//   B [16, 8]    registers (c, g), (c + 8, g), two rows each
//   C [16, 8]    floats (g, c), (g, c + 1), (g + 8, c), (g + 8, c + 1)
#pragma once
#include <bit>

#include "tensor/bf16.h"
#include "tensor/cuda/launch.cuh"

namespace regather::cuda {

using Bf16Pair = std::uint32_t;  // the first one in the lower half

__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ float widened(Bf16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16); }

#if defined(__CUDACC__)

__device__ __forceinline__ Bf16Pair rounded_pair(float first, float second) {
  Bf16Pair pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
// c += A B.
__device__ __forceinline__ void multiply_fragments(float (&c)[4], const Bf16Pair (&a)[4], const Bf16Pair (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Four matrices of 8 rows of 8 from shared memory; lane i points to row i % 8 of matrix i / 8, on 16 bytes. Register m:
// of matrix m, row g, columns c and c + 1; transposed: rows c and c + 1 of column g.
__device__ __forceinline__ void load_matrices(Bf16Pair (&r)[4], const Bf16* row) {
  const auto at = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
__device__ __forceinline__ void load_transposed(Bf16Pair (&r)[4], const Bf16* row) {
  const auto at = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}

#else

inline Bf16Pair rounded_pair(float first, float second) {
  return ::cuda_emu::bf16_bits(first) | static_cast<Bf16Pair>(::cuda_emu::bf16_bits(second)) << 16;
}
inline void multiply_fragments(float (&c)[4], const Bf16Pair (&a)[4], const Bf16Pair (&b)[2], CUDA_EMU_PLACE) {
  ::cuda_emu::warp_multiply(c, a, b, {file, line});
}
inline void load_matrices(Bf16Pair (&r)[4], const Bf16* row, CUDA_EMU_PLACE) {
  ::cuda_emu::warp_load_matrices(r, row, ::cuda_emu::Transposed::No, {file, line});
}
inline void load_transposed(Bf16Pair (&r)[4], const Bf16* row, CUDA_EMU_PLACE) {
  ::cuda_emu::warp_load_matrices(r, row, ::cuda_emu::Transposed::Yes, {file, line});
}

#endif

template <class T>
__device__ __forceinline__ T rounded(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return static_cast<Bf16>(rounded_pair(x, 0.0F) & 0xffffU);
}
template <class T>
__device__ __forceinline__ Pack<T, 4> rounded(const Float4& x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return std::bit_cast<Pack<Bf16, 4>>(
        Pack<Bf16Pair, 2>{{rounded_pair(x.v[0], x.v[1]), rounded_pair(x.v[2], x.v[3])}});
}

}  // namespace regather::cuda
