// What tests of the CUDA device share: numbers, to a device and back.
#pragma once
#include <random>
#include <vector>

#include "tensor/device.h"

namespace regather::testing {

inline std::vector<float> numbers(std::int64_t n, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& v : x) v = normal(random);
  return x;
}
inline std::int64_t bytes_of(const std::vector<float>& x) {
  return static_cast<std::int64_t>(x.size() * sizeof(float));
}

inline Buffer on_device(Device& device, const std::vector<float>& x, Stream stream = Stream::Compute) {
  Buffer buffer(device.memory, bytes_of(x), Tag::Workspace);
  device.write(stream, buffer.data(), x.data(), buffer.bytes());
  return buffer;
}
inline std::vector<float> on_host(Device& device, const Buffer& buffer, Stream stream = Stream::Compute) {
  std::vector<float> x(static_cast<std::size_t>(buffer.bytes()) / sizeof(float));
  device.read(stream, x.data(), buffer.data(), buffer.bytes());
  return x;
}

}  // namespace regather::testing
