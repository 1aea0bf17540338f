// Memory that a GPU's device takes when it is made and holds as long as it lives, whatever it runs: so that a run
// without storage, in any build, counts what the device will. It allocates for nobody else.
#pragma once
#include <vector>

#include "tensor/memory.h"

namespace regather {

// Partial sums of kernels that split their work: such a kernel takes no more pieces than fit.
inline constexpr std::int64_t kGpuScratchBytes = std::int64_t{16} << 20;
// Of cuBLAS: NVIDIA's advice for Hopper. One workspace and one stream: the same bits for the same call.
inline constexpr std::int64_t kGpuProductsBytes = std::int64_t{32} << 20;
inline constexpr std::int64_t kGpuFaultBytes = 20;
// Of the host: results that are waited for; pieces through which pageable memory is copied.
inline constexpr std::int64_t kGpuResultBytes = 4096;
inline constexpr std::int64_t kGpuStagingBytes = std::int64_t{8} << 20, kGpuStagingPieces = 4;

// The same allocations in a meta run.
inline std::vector<Buffer> take_gpu_room(Allocator& memory) {
  const Allocator::Asking asking(memory, "the GPU's device");
  std::vector<Buffer> room;
  for (std::int64_t i = 0; i < kGpuStagingPieces; ++i)
    room.emplace_back(memory, kGpuStagingBytes / kGpuStagingPieces, Tag::Host);
  for (const std::int64_t bytes : {kGpuScratchBytes, kGpuProductsBytes, kGpuFaultBytes})
    room.emplace_back(memory, bytes, Tag::Workspace);
  for (const std::int64_t bytes : {kGpuResultBytes, kGpuFaultBytes}) room.emplace_back(memory, bytes, Tag::Host);
  return room;
}

}  // namespace regather
