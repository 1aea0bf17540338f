// A GPU as a Device: five streams, events on them, and stream-ordered memory. Invariants: memory is allocated and freed
// in the order of the compute stream, so that another stream which is given a buffer waits for compute first, and
// compute waits for it before the buffer is freed (ShardUnit does both); host code is never waited for by a device, and
// a device by host code only in read(), write() when its staging is full, and Event::wait(). One device a rank.
#pragma once
#include <memory>

#include "tensor/device.h"
#include "tensor/gpu_room.h"

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace regather {

namespace cuda {
class Streams;
}

class CudaDevice final : public Device {
 public:
  // index: which of the machine's GPUs. limit: bytes of all tags except Host; 0: none. staging_bytes: pinned memory
  // through which pageable memory is copied.
  explicit CudaDevice(int index, std::int64_t limit = 0, std::int64_t staging_bytes = kGpuStagingBytes);
  ~CudaDevice() override;

  DeviceKind kind() const override { return DeviceKind::Cuda; }
  GpuOps* gpu() override;
  Event record(Stream stream) override;
  void wait(Stream stream, const Event& event) override;
  void copy(Stream stream, void* to, const void* from, std::int64_t bytes) override;
  CopyCounts copies(Stream stream) const override;
  void zero(Stream stream, void* to, std::int64_t bytes) override;
  void add(Stream stream, float* sum, const float* a, const float* b, std::int64_t n) override;
  void add(Stream stream, Bf16* sum, const Bf16* a, const Bf16* b, std::int64_t n) override;
  void round(Stream stream, Bf16* to, const float* from, std::int64_t n) override;
  void write(Stream stream, void* to, const void* from, std::int64_t bytes) override;
  void read(Stream stream, void* to, const void* from, std::int64_t bytes) override;
  void wait_with(std::weak_ptr<const Waiter> waiter) override;

  CUstream_st* stream(Stream stream) const;
  int index() const;

 private:
  struct Parts;
  CudaDevice(std::shared_ptr<cuda::Streams> streams, std::int64_t limit, std::int64_t staging_bytes);

  std::unique_ptr<Parts> parts_;
};

}  // namespace regather
