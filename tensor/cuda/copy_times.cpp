#include "tensor/cuda/copy_times.h"

#include "tensor/cuda/status.h"

namespace regather::cuda {

CopyTimes::~CopyTimes() {
  for (const Span& span : open_)
    for (cudaEvent_t event : {span.begin, span.end})
      if (event) static_cast<void>(cudaEventDestroy(event));
  for (cudaEvent_t event : idle_) static_cast<void>(cudaEventDestroy(event));
}

cudaEvent_t CopyTimes::record() {
  cudaEvent_t event = nullptr;
  if (idle_.empty()) {
    check_status(cudaEventCreateWithFlags(&event, cudaEventDefault), "cudaEventCreateWithFlags");
  } else {
    event = idle_.back();
    idle_.pop_back();
  }
  check_status(cudaEventRecord(event, stream_), "cudaEventRecord");
  return event;
}

void CopyTimes::begin(std::int64_t bytes) {
  add_up();
  open_.push_back({record(), nullptr, bytes});
}

void CopyTimes::end() { open_.back().end = record(); }

CopyCounts CopyTimes::counts() {
  add_up();
  return counts_;
}

void CopyTimes::add_up() {
  while (!open_.empty() && open_.front().end) {
    const Span& span = open_.front();
    const cudaError_t status = cudaEventQuery(span.end);
    if (status == cudaErrorNotReady) return;
    check_status(status, "cudaEventQuery");
    float milliseconds = 0;
    check_status(cudaEventElapsedTime(&milliseconds, span.begin, span.end), "cudaEventElapsedTime");
    counts_.bytes += span.bytes;
    counts_.seconds += 1e-3 * static_cast<double>(milliseconds);
    idle_.insert(idle_.end(), {span.begin, span.end});
    open_.pop_front();
  }
}

}  // namespace regather::cuda
