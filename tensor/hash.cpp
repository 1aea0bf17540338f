#include "tensor/hash.h"

#include <vector>

#define XXH_INLINE_ALL
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#include <xxhash.h>
#pragma GCC diagnostic pop

namespace regather {

std::uint64_t hash_of(const void* data, std::size_t bytes) { return XXH3_64bits(data, bytes); }

std::uint64_t hash_of(Device& device, const Tensor& t) {
  if (device.kind() == DeviceKind::Cpu) return hash_of(t);
  std::vector<std::byte> bytes(static_cast<std::size_t>(t.bytes()));
  device.read(Stream::Compute, bytes.data(), t.data<void>(), t.bytes());
  return hash_of(bytes.data(), bytes.size());
}

}  // namespace regather
