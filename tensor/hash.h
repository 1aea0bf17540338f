// A 64-bit hash of a tensor's bytes (XXH3), for comparisons by value. Not cryptographic.
#pragma once
#include <cstdint>

#include "tensor/device.h"
#include "tensor/tensor.h"

namespace regather {

std::uint64_t hash_of(const void* data, std::size_t bytes);
inline std::uint64_t hash_of(const Tensor& t) { return hash_of(t.data<void>(), static_cast<std::size_t>(t.bytes())); }
std::uint64_t hash_of(Device& device, const Tensor& t);  // of a tensor in the device's memory; waits for it

}  // namespace regather
