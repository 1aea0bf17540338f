// What a step runs on: memory, streams of work, and events between them. Every call names its stream. On a CPU each
// call is done when it returns, except copies to and from the host, which have a thread each, and waiting for an event
// that something else completes (a collective in flight); on a GPU a stream is a queue. Invariant: host code never
// assumes that enqueued work is done unless it waited on an event. A meta device counts memory and computes nothing. It
// does not know operations, shards or communication.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/bf16.h"
#include "tensor/element.h"
#include "tensor/memory.h"
#include "tensor/work.h"

namespace regather {

struct Trace;
class Recorder;
class GpuOps;  // tensor/ops/gpu_ops.h

enum class DeviceKind { Cpu, Cuda };
enum class Stream { Compute, Gather, Reduce, ToHost, ToDevice };

// Something that will have happened. A cheap handle; an empty one has happened already.
class Event {
 public:
  class State {
   public:
    virtual ~State() = default;
    virtual bool done() = 0;  // polls; drives progress where progress needs driving
    virtual void wait() = 0;  // the host waits; throws what the work threw
    // For what a device completes by itself: its event, which a stream can wait for without the host. Empty: it has
    // none.
    virtual Event enqueued() { return {}; }
  };
  Event() = default;
  explicit Event(std::shared_ptr<State> state) : state_(std::move(state)) {}
  bool done() const { return !state_ || state_->done(); }
  void wait() const {
    if (state_) state_->wait();
  }
  State* state() const { return state_.get(); }

 private:
  std::shared_ptr<State> state_;
};

// Copies of a stream that are done, and the time that they took.
struct CopyCounts {
  std::int64_t bytes = 0;
  double seconds = 0;
};

class Device {
 public:
  // source: where memory comes from; none: the host's (tensor/arena.h).
  explicit Device(Allocator::Mode mode = Allocator::Mode::Real, std::int64_t limit = 0,
                  std::unique_ptr<MemorySource> source = nullptr)
      : memory(mode, limit, std::move(source)) {}
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  virtual DeviceKind kind() const = 0;
  virtual GpuOps* gpu() { return nullptr; }  // what operations compute with; null: the CPU's kernels
  bool meta() const { return memory.meta(); }

  virtual Event record(Stream stream) = 0;                   // happens when all that was enqueued so far has
  virtual void wait(Stream stream, const Event& event) = 0;  // what is enqueued later runs after the event
  virtual void copy(Stream stream, void* to, const void* from, std::int64_t bytes) = 0;  // no-op in a meta run
  virtual CopyCounts copies(Stream) const { return {}; }  // of ToHost and ToDevice, so far
  virtual void zero(Stream stream, void* to, std::int64_t bytes) = 0;
  virtual void add(Stream stream, float* sum, const float* a, const float* b, std::int64_t n) = 0;  // sum may be a or b
  // The same of bf16 elements; and fp32 rounded to bf16.
  virtual void add(Stream stream, Bf16* sum, const Bf16* a, const Bf16* b, std::int64_t n) = 0;
  virtual void round(Stream stream, Bf16* to, const float* from, std::int64_t n) = 0;
  // Between the device's memory and any of the host's. write: `from` may change when it returns. read: waits until the
  // bytes are there, and throws what the work before it found wrong.
  virtual void write(Stream stream, void* to, const void* from, std::int64_t bytes) = 0;
  virtual void read(Stream stream, void* to, const void* from, std::int64_t bytes) = 0;
  // How the host waits for this device while `waiter` lives: it returns when done() is true, or throws. For work that
  // may wait for ever, as for a rank that is gone. A device that the host never waits for has no use for it.
  using Waiter = std::function<void(const std::function<bool()>& done)>;
  virtual void wait_with(std::weak_ptr<const Waiter> waiter) { static_cast<void>(waiter); }

  Allocator memory;
  // Called after each operation, and between the parts of a long one (each up to four launches of a GPU), when set:
  // communication makes progress here.
  std::function<void()> between_ops;
  void make_progress() const {
    if (between_ops) between_ops();
  }
  Trace* trace = nullptr;        // what ran; off when null
  Recorder* recorder = nullptr;  // when it ran; off when null
};

class CopyThread;

class CpuDevice final : public Device {
 public:
  // stands_for: of a meta device, the kind whose memory it counts: what operations ask for there, and what such a
  // device holds by itself (tensor/gpu_room.h).
  explicit CpuDevice(Allocator::Mode mode = Allocator::Mode::Real, std::int64_t limit = 0,
                     DeviceKind stands_for = DeviceKind::Cpu);
  ~CpuDevice() override;
  DeviceKind kind() const override { return kind_; }
  Event record(Stream stream) override;
  void wait(Stream stream, const Event& event) override;
  void copy(Stream stream, void* to, const void* from, std::int64_t bytes) override;
  CopyCounts copies(Stream stream) const override;
  void zero(Stream, void* to, std::int64_t bytes) override;
  void add(Stream, float* sum, const float* a, const float* b, std::int64_t n) override;
  void add(Stream, Bf16* sum, const Bf16* a, const Bf16* b, std::int64_t n) override;
  void round(Stream, Bf16* to, const float* from, std::int64_t n) override;
  void write(Stream stream, void* to, const void* from, std::int64_t bytes) override { copy(stream, to, from, bytes); }
  void read(Stream stream, void* to, const void* from, std::int64_t bytes) override { copy(stream, to, from, bytes); }

  // On the thread of a copy stream, before each of its copies; may throw. For tests that slow copies down or break one.
  std::function<void(Stream, std::int64_t bytes)> before_copy;

 private:
  CopyThread& start(Stream stream);
  DeviceKind kind_;
  std::vector<Buffer> room_;
  std::unique_ptr<CopyThread> to_host_, to_device_;  // started when they are first asked
};

// A GPU that this process sees. id: tells it from every other one, of this machine or another.
struct GpuInfo {
  std::string name{}, id{};      // id: "GPU-3f2a...", as nvidia-smi -L writes it
  std::int64_t memory = 0;       // bytes
  int major = 0, minor = 0;      // compute capability
  MachineLimits fp32{}, bf16{};  // at its highest clock; of matrix products with fp32 sums
  const MachineLimits& limits(DType type) const { return type == DType::BF16 ? bf16 : fp32; }
};
// Those there are. Throws UsageError in a build without CUDA, and with the driver's word where there is none.
std::vector<GpuInfo> cuda_gpus();
// The index-th of them (tensor/cuda/device.h); the same errors, and that it is too old.
std::unique_ptr<Device> make_cuda_device(int index, std::int64_t limit);

}  // namespace regather
