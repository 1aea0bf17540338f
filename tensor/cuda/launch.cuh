// What kernels are written with: launching, shared memory, and access to global memory. Beside bf16.cuh the only file
// that tells the device's compiler from the emulator's (tests/cuda_emu), so that all else is the same source for both.
// Invariant: kernels read and write global memory through load, store and atomics alone; the emulator counts and
// checks them.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "tensor/cuda/status.h"

namespace regather::cuda {

// Up to 16 bytes that move as one.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  static_assert(sizeof(T) * N <= 16);
  T v[N];
};
using Float4 = Pack<float, 4>;

#if defined(__CUDACC__)

template <class T>
__device__ __forceinline__ T load(const T* from) {
  return *from;
}
template <class T>
__device__ __forceinline__ void store(T* to, const T& value) {
  *to = value;
}
// One variable of a block; T is one struct a kernel.
template <class T>
__device__ __forceinline__ T& block_shared() {
  __shared__ T variable;
  return variable;
}
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char bytes[];
  return reinterpret_cast<T*>(bytes);
}
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
            cudaStream_t stream, Arguments... arguments) {
  kernel<<<grid, block, shared_bytes, stream>>>(static_cast<Parameters>(arguments)...);
  check_launch(name);
}

#else

// Inlined even without optimization: the emulator tells accesses apart by where they are called from.
template <class T>
__forceinline__ T load(const T* from) {
  ::cuda_emu::count_access(::cuda_emu::Access::Load, from, sizeof(T));
  return *from;
}
template <class T>
__forceinline__ void store(T* to, const T& value) {
  ::cuda_emu::count_access(::cuda_emu::Access::Store, to, sizeof(T));
  *to = value;
}
template <class T>
T& block_shared() {
  static const char key = 0;
  return *static_cast<T*>(::cuda_emu::shared_memory(&key, sizeof(T)));
}
template <class T>
T* dynamic_shared() {
  return static_cast<T*>(::cuda_emu::dynamic_shared_memory());
}
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
            cudaStream_t stream, Arguments... arguments) {
  ::cuda_emu::launch_kernel(name, reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, stream,
                            [=] { kernel(static_cast<Parameters>(arguments)...); });
  check_launch(name);
}

#endif

}  // namespace regather::cuda
