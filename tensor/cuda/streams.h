// The streams of one GPU and the events on them, shared by the device and by everything that may outlive it (events,
// memory). Making it chooses the GPU for the calling thread, which is the only one that uses it.
#pragma once
#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <vector>

#include "tensor/device.h"

namespace regather::cuda {

inline constexpr std::array kAllStreams = {Stream::Compute, Stream::Gather, Stream::Reduce, Stream::ToHost,
                                           Stream::ToDevice};

class Streams : public std::enable_shared_from_this<Streams> {
 public:
  explicit Streams(int device_index);
  ~Streams();
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  cudaStream_t operator[](Stream stream) const { return streams_[static_cast<std::size_t>(stream)]; }
  int device_index() const { return device_index_; }
  Event record(Stream stream);
  void wait(Stream stream, const Event& event);
  void wait_with(std::weak_ptr<const Device::Waiter> waiter) { waiter_ = std::move(waiter); }  // see Device

 private:
  class Recorded;
  cudaEvent_t take_event();

  int device_index_;
  std::array<cudaStream_t, kAllStreams.size()> streams_{};
  std::vector<cudaEvent_t> idle_events_;
  std::weak_ptr<const Device::Waiter> waiter_;
};

}  // namespace regather::cuda
