#include "tensor/cuda/streams.h"

#include "tensor/cuda/status.h"

namespace regather::cuda {

// What was in a stream when it was recorded. Goes back to the pool when nobody asks for it any more.
class Streams::Recorded final : public Event::State {
 public:
  Recorded(std::shared_ptr<Streams> streams, Stream stream)
      : streams_(std::move(streams)), event_(streams_->take_event()) {
    check_status(cudaEventRecord(event_, (*streams_)[stream]), "cudaEventRecord");
  }
  ~Recorded() override { streams_->idle_events_.push_back(event_); }
  bool done() override {
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) return false;
    check_status(status, "cudaEventQuery");
    return true;
  }
  void wait() override {
    if (const auto waiter = streams_->waiter_.lock()) return (*waiter)([this] { return done(); });
    check_status(cudaEventSynchronize(event_), "cudaEventSynchronize");
  }
  cudaEvent_t event() const { return event_; }

 private:
  std::shared_ptr<Streams> streams_;
  cudaEvent_t event_;
};

Streams::Streams(int device_index) : device_index_(device_index) {
  check_status(cudaSetDevice(device_index), "cudaSetDevice");
  int least = 0, greatest = 0;  // a greater priority is a smaller number
  check_status(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  for (const Stream stream : kAllStreams) {  // a collective's few blocks do not queue behind those of a product
    const bool collectives = stream == Stream::Gather || stream == Stream::Reduce;
    check_status(cudaStreamCreateWithPriority(&streams_[static_cast<std::size_t>(stream)], cudaStreamNonBlocking,
                                              collectives ? greatest : least),
                 "cudaStreamCreateWithPriority");
  }
}

Streams::~Streams() {  // what is enqueued still runs; there is nobody to tell of an error
  for (cudaStream_t stream : streams_)
    if (stream) static_cast<void>(cudaStreamDestroy(stream));
  for (cudaEvent_t event : idle_events_) static_cast<void>(cudaEventDestroy(event));
}

cudaEvent_t Streams::take_event() {
  if (idle_events_.empty()) {
    cudaEvent_t event = nullptr;
    check_status(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    idle_events_.reserve(idle_events_.capacity() + 1);  // so that giving it back cannot fail
    return event;
  }
  const cudaEvent_t event = idle_events_.back();
  idle_events_.pop_back();
  return event;
}

Event Streams::record(Stream stream) { return Event(std::make_shared<Recorded>(shared_from_this(), stream)); }

void Streams::wait(Stream stream, const Event& event) {
  Event::State* state = event.state();
  if (!state) return;
  const Event enqueued = state->enqueued();
  if (const auto* recorded = dynamic_cast<Recorded*>(enqueued.state() ? enqueued.state() : state))
    check_status(cudaStreamWaitEvent((*this)[stream], recorded->event(), 0), "cudaStreamWaitEvent");
  else
    state->wait();
}

}  // namespace regather::cuda
