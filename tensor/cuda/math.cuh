// Scalar functions of several operations.
#pragma once
#include "tensor/cuda/launch.cuh"
#include "tensor/ops/gpu_ops.h"

namespace regather::cuda {

__device__ __forceinline__ float sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }

// A random mask as a kernel takes it: the key's words are made once, on the host.
struct DeviceMask {
  std::uint32_t threshold;
  float scale;
  std::uint32_t key[2];
  std::uint64_t sequence;

  // Four words for elements 4q .. 4q+3 of the b-th sequence, as RngKey::quad gives them.
  __device__ __forceinline__ PhiloxBlock quad(std::uint64_t b, std::uint64_t q) const {
    const std::uint64_t s = sequence + b;
    return philox({key[0], key[1]}, {static_cast<std::uint32_t>(q), static_cast<std::uint32_t>(q >> 32),
                                     static_cast<std::uint32_t>(s), static_cast<std::uint32_t>(s >> 32)});
  }
  // What element e of the b-th sequence is multiplied by.
  __device__ __forceinline__ float factor(std::uint64_t b, std::uint64_t e) const {
    const PhiloxBlock words = quad(b, e / 4);  // an index would put them into memory
    const std::uint32_t low = (e & 1) != 0 ? words[1] : words[0], high = (e & 1) != 0 ? words[3] : words[2];
    return ((e & 2) != 0 ? high : low) < threshold ? 0.0F : scale;
  }
};

inline DeviceMask device_mask(const RandomMask& mask) {
  const auto words = mask.key.words();
  return {mask.threshold, mask.scale, {words[0], words[1]}, mask.key.sequence};
}

}  // namespace regather::cuda
