#include "tensor/cuda/memory.h"

#include <algorithm>
#include <limits>

#include "tensor/cuda/status.h"

namespace regather::cuda {
namespace {

// Pinned blocks are whole pages; what one step asks for the next asks for again, in the same sizes.
constexpr std::size_t kPage = 4096;
std::size_t pinned_size(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

CudaMemory::CudaMemory(std::shared_ptr<Streams> streams) : streams_(std::move(streams)) {
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = streams_->device_index();
  check_status(cudaMemPoolCreate(&pool_, &properties), "cudaMemPoolCreate");
  std::uint64_t all = std::numeric_limits<std::uint64_t>::max();  // what is freed stays for the next request
  check_status(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &all), "cudaMemPoolSetAttribute");
}

CudaMemory::~CudaMemory() {
  for (const Returning& block : returning_) {
    for (const Stream stream : kAllStreams) static_cast<void>(cudaStreamSynchronize((*streams_)[stream]));
    static_cast<void>(cudaFreeHost(block.data));
  }
  free_idle();
  if (pool_) static_cast<void>(cudaMemPoolDestroy(pool_));  // ends when what was freed before has been given back
}

void* CudaMemory::allocate(std::size_t bytes, Tag tag) {
  if (tag == Tag::Host) return allocate_pinned(pinned_size(bytes));
  void* data = nullptr;
  const cudaError_t status = cudaMallocFromPoolAsync(&data, bytes, pool_, (*streams_)[Stream::Compute]);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());  // it is the allocator that says so
    return nullptr;
  }
  check_status(status, "cudaMallocFromPoolAsync");
  return data;
}

void CudaMemory::release(void* data, std::size_t bytes, Tag tag) noexcept {
  if (tag != Tag::Host) {
    static_cast<void>(cudaFreeAsync(data, (*streams_)[Stream::Compute]));
    return;
  }
  try {
    Returning& block = returning_.emplace_back(Returning{data, pinned_size(bytes), {}});
    for (std::size_t i = 0; i < kAllStreams.size(); ++i) block.passed[i] = streams_->record(kAllStreams[i]);
  } catch (...) {  // a device that has failed: the process ends with its error, and the block with the process
  }
}

void CudaMemory::collect_returned() {
  while (!returning_.empty() &&
         std::ranges::all_of(returning_.front().passed, [](const Event& event) { return event.done(); })) {
    idle_.emplace(returning_.front().bytes, returning_.front().data);
    returning_.pop_front();
  }
}

void* CudaMemory::allocate_pinned(std::size_t bytes) {
  collect_returned();
  if (const auto found = idle_.find(bytes); found != idle_.end()) {
    void* data = found->second;
    idle_.erase(found);
    return data;
  }
  void* data = nullptr;
  cudaError_t status = cudaHostAlloc(&data, bytes, cudaHostAllocDefault);
  if (status == cudaErrorMemoryAllocation && !idle_.empty()) {  // blocks of other sizes may be in its way
    static_cast<void>(cudaGetLastError());
    free_idle();
    status = cudaHostAlloc(&data, bytes, cudaHostAllocDefault);
  }
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    return nullptr;
  }
  check_status(status, "cudaHostAlloc");
  return data;
}

void CudaMemory::free_idle() noexcept {
  for (const auto& [bytes, data] : idle_) static_cast<void>(cudaFreeHost(data));
  idle_.clear();
}

std::size_t CudaMemory::system_bytes() const {
  std::uint64_t reserved = 0;
  check_status(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrReservedMemCurrent, &reserved), "cudaMemPoolGetAttribute");
  return reserved;
}

}  // namespace regather::cuda
