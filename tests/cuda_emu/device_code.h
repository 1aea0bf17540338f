// The device's side: included before everything else when a .cu file is compiled by a host compiler. NVIDIA's own
// headers stay in use; for a host compiler they define __global__ and __device__ as nothing. Every CUDA thread is a
// fiber, blocks run one after another; barriers and shuffles switch fibers and report what a device would leave
// undefined: divergence, threads that never come, lanes outside the mask.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#undef __shared__
#undef __launch_bounds__
#define __shared__ shared_memory_is_had_by_block_shared_and_dynamic_shared
#define __launch_bounds__(...)

namespace cuda_emu {

struct Place {  // in the source
  const char* file;
  int line;
};
struct ThreadContext {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
  int linear, lane, warp;
};
extern ThreadContext* this_thread;

enum class Vote { None, Any, All };
bool block_barrier(Vote vote, bool mine, Place place);
void warp_barrier(unsigned mask, Place place);
std::uint64_t warp_read(unsigned mask, std::uint64_t mine, int lane, Place place);
unsigned warp_ballot(unsigned mask, bool mine, Place place);

// bf16, and what tensor cores do with it (tensor/cuda/bf16.cuh).
std::uint16_t bf16_bits(float x);  // to nearest, ties to even
enum class Transposed { No, Yes };
void warp_multiply(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], Place place);
void warp_load_matrices(std::uint32_t (&r)[4], const void* row, Transposed transposed, Place place);

enum class Access { Load, Store, Atomic };
void count_access(Access access, const void* data, std::size_t bytes);
void* shared_memory(const void* key, std::size_t bytes);  // of this block, full of NaNs at its first use
void* dynamic_shared_memory();
void launch_kernel(const char* name, const void* kernel, dim3 grid, dim3 block, std::size_t shared_bytes,
                   cudaStream_t stream, std::function<void()> body);

template <class T>
T shuffle(unsigned mask, T value, int lane, Place place) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = warp_read(mask, bits, lane, place);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T, class F>
T atomic_update(T* data, F update) {
  count_access(Access::Atomic, data, sizeof(T));
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  Bits* bits = reinterpret_cast<Bits*>(data);
  Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED), after = 0;
  do after = std::bit_cast<Bits>(update(std::bit_cast<T>(before)));
  while (!__atomic_compare_exchange_n(bits, &before, after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return std::bit_cast<T>(before);
}

}  // namespace cuda_emu

#define threadIdx (::cuda_emu::this_thread->thread)
#define blockIdx (::cuda_emu::this_thread->block)
#define blockDim (::cuda_emu::this_thread->block_dim)
#define gridDim (::cuda_emu::this_thread->grid_dim)

// Default arguments of a builtin name the caller's line.
#define CUDA_EMU_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(CUDA_EMU_PLACE) { cuda_emu::block_barrier(cuda_emu::Vote::None, false, {file, line}); }
inline int __syncthreads_or(int mine, CUDA_EMU_PLACE) {
  return cuda_emu::block_barrier(cuda_emu::Vote::Any, mine != 0, {file, line});
}
inline int __syncthreads_and(int mine, CUDA_EMU_PLACE) {
  return cuda_emu::block_barrier(cuda_emu::Vote::All, mine != 0, {file, line});
}
inline void __syncwarp(unsigned mask = ~0U, CUDA_EMU_PLACE) { cuda_emu::warp_barrier(mask, {file, line}); }
template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32, CUDA_EMU_PLACE) {
  const int lane = cuda_emu::this_thread->lane;
  return cuda_emu::shuffle(mask, value, (lane & ~(width - 1)) | (from & (width - 1)), {file, line});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, CUDA_EMU_PLACE) {
  const int lane = cuda_emu::this_thread->lane, from = lane ^ bits;
  return cuda_emu::shuffle(mask, value, (from & ~(width - 1)) > (lane & ~(width - 1)) ? lane : from, {file, line});
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, CUDA_EMU_PLACE) {
  const int lane = cuda_emu::this_thread->lane, from = lane + static_cast<int>(by);
  return cuda_emu::shuffle(mask, value, (from & ~(width - 1)) != (lane & ~(width - 1)) ? lane : from, {file, line});
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, CUDA_EMU_PLACE) {
  const int lane = cuda_emu::this_thread->lane, from = lane - static_cast<int>(by);
  return cuda_emu::shuffle(mask, value, from < (lane & ~(width - 1)) ? lane : from, {file, line});
}
inline unsigned __ballot_sync(unsigned mask, int mine, CUDA_EMU_PLACE) {
  return cuda_emu::warp_ballot(mask, mine != 0, {file, line});
}
inline int __any_sync(unsigned mask, int mine, CUDA_EMU_PLACE) {
  return cuda_emu::warp_ballot(mask, mine != 0, {file, line}) != 0;
}
inline int __all_sync(unsigned mask, int mine, CUDA_EMU_PLACE) {
  return cuda_emu::warp_ballot(mask, mine == 0, {file, line}) == 0;  // nobody is against
}

template <class T>
T atomicAdd(T* data, T value) {
  return cuda_emu::atomic_update(data, [=](T old) { return static_cast<T>(old + value); });
}
template <class T>
T atomicMax(T* data, T value) {
  return cuda_emu::atomic_update(data, [=](T old) { return std::max(old, value); });
}
template <class T>
T atomicMin(T* data, T value) {
  return cuda_emu::atomic_update(data, [=](T old) { return std::min(old, value); });
}
template <class T>
T atomicCAS(T* data, T expected, T value) {
  return cuda_emu::atomic_update(data, [=](T old) { return old == expected ? value : old; });
}
inline void __threadfence() {}

inline float rsqrtf(float x) { return 1.0F / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(a) * b) >> 32);
}
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __popc(unsigned x) { return std::popcount(x); }
using std::isfinite;
using std::max;
using std::min;
