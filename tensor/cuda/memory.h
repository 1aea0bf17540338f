// Where a CUDA device's bytes come from: a pool of CUDA's own for device memory, in the order of the compute stream,
// and pinned host memory (Tag::Host), whose blocks are kept and given out again once every stream has passed the place
// where they were released. It counts no tags and knows no limit: that is the Allocator's.
#pragma once
#include <deque>
#include <map>
#include <memory>

#include "tensor/cuda/streams.h"
#include "tensor/memory.h"

namespace regather::cuda {

class CudaMemory final : public MemorySource {
 public:
  explicit CudaMemory(std::shared_ptr<Streams> streams);
  ~CudaMemory() override;
  void* allocate(std::size_t bytes, Tag tag) override;
  void release(void* data, std::size_t bytes, Tag tag) noexcept override;
  std::size_t system_bytes() const override;

 private:
  struct Returning {
    void* data;
    std::size_t bytes;
    std::array<Event, kAllStreams.size()> passed;
  };
  void* allocate_pinned(std::size_t bytes);
  void collect_returned();
  void free_idle() noexcept;

  std::shared_ptr<Streams> streams_;
  cudaMemPool_t pool_ = nullptr;
  std::multimap<std::size_t, void*> idle_;  // pinned, by size
  std::deque<Returning> returning_;
};

}  // namespace regather::cuda
