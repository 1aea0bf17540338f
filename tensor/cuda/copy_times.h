// How long the copies of one stream take, by events around each. What has ended is added up when it is asked for or
// when the next copy begins; nothing waits.
#pragma once
#include <deque>
#include <memory>
#include <vector>

#include "tensor/cuda/streams.h"

namespace regather::cuda {

class CopyTimes {
 public:
  explicit CopyTimes(cudaStream_t stream) : stream_(stream) {}
  ~CopyTimes();
  CopyTimes(const CopyTimes&) = delete;
  CopyTimes& operator=(const CopyTimes&) = delete;

  void begin(std::int64_t bytes);
  void end();
  CopyCounts counts();

 private:
  struct Span {
    cudaEvent_t begin, end;
    std::int64_t bytes;
  };
  void add_up();
  cudaEvent_t record();

  cudaStream_t stream_;
  std::deque<Span> open_;  // not yet added up, in their order
  std::vector<cudaEvent_t> idle_;
  CopyCounts counts_;
};

}  // namespace regather::cuda
