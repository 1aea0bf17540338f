#include "tensor/cuda/device.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "tensor/cuda/copy_times.h"
#include "tensor/cuda/cuda_ops.h"
#include "tensor/cuda/memory.h"
#include "tensor/cuda/status.h"
#include "tensor/cuda/streams.h"
#include "tensor/error.h"

namespace regather {
namespace {

using cuda::check_status;
using cuda::Streams;

constexpr int kOldestGpu = 8;  // mma.sync of bf16, asynchronous copies

double attribute(cudaDeviceAttr which, int index) {
  int value = 0;
  check_status(cudaDeviceGetAttribute(&value, which, index), "cudaDeviceGetAttribute");
  return value;
}

// Floating point operations of a multiprocessor in a clock: of its fp32 lanes, and of its tensor cores on dense bf16.
struct PerClock {
  double fp32, bf16;
};
PerClock per_clock(int major, int minor) {
  if (major == 8) return minor == 0 ? PerClock{128, 2048} : PerClock{256, 1024};
  return major == 9 ? PerClock{256, 4096} : PerClock{256, 8192};
}

GpuInfo describe_gpu(int index) {
  cudaDeviceProp p{};
  check_status(cudaGetDeviceProperties(&p, index), "cudaGetDeviceProperties");
  GpuInfo gpu{
      .name = p.name, .memory = static_cast<std::int64_t>(p.totalGlobalMem), .major = p.major, .minor = p.minor};
  gpu.id = "GPU";
  for (std::size_t i = 0; i < sizeof p.uuid.bytes; ++i)
    gpu.id += fmt::format("{}{:02x}", i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                          static_cast<unsigned char>(p.uuid.bytes[i]));
  const double clocks = 1e3 * attribute(cudaDevAttrClockRate, index) * p.multiProcessorCount,
               bytes = 2e3 * attribute(cudaDevAttrMemoryClockRate, index) *
                       attribute(cudaDevAttrGlobalMemoryBusWidth, index) / 8;  // two transfers a clock
  const PerClock flops = per_clock(p.major, p.minor);
  gpu.fp32 = {.flops = clocks * flops.fp32, .bytes = bytes};
  gpu.bf16 = {.flops = clocks * flops.bf16, .bytes = bytes};
  return gpu;
}

// Pinned pieces that pageable memory is copied through, one after another.
class Staging {
 public:
  Staging(Allocator& memory, Streams& streams, std::int64_t bytes)
      : streams_(streams), piece_(bytes / kGpuStagingPieces) {
    for (std::int64_t i = 0; i < kGpuStagingPieces; ++i) pieces_.push_back({Buffer(memory, piece_, Tag::Host), {}});
  }

  void write(Stream stream, std::byte* to, const std::byte* from, std::int64_t bytes) {
    for (std::int64_t done = 0; done < bytes; done += piece_) {
      Piece& piece = next();
      piece.free.wait();
      const auto n = static_cast<std::size_t>(std::min(piece_, bytes - done));
      std::memcpy(piece.buffer.data(), from + done, n);
      copy(to + done, piece.buffer.data(), n, stream);
      piece.free = streams_.record(stream);
    }
  }
  void read(Stream stream, std::byte* to, const std::byte* from, std::int64_t bytes) {
    for (std::int64_t done = 0; done < bytes; done += piece_) {
      Piece& piece = next();
      piece.free.wait();
      const auto n = static_cast<std::size_t>(std::min(piece_, bytes - done));
      copy(piece.buffer.data(), from + done, n, stream);
      streams_.record(stream).wait();
      std::memcpy(to + done, piece.buffer.data(), n);
    }
  }

 private:
  struct Piece {
    Buffer buffer;
    Event free;
  };
  Piece& next() { return pieces_[next_++ % pieces_.size()]; }
  void copy(void* to, const void* from, std::size_t bytes, Stream stream) {
    check_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, streams_[stream]), "cudaMemcpyAsync");
  }

  Streams& streams_;
  std::int64_t piece_;
  std::vector<Piece> pieces_;
  std::size_t next_ = 0;
};

}  // namespace

struct CudaDevice::Parts {
  Parts(std::shared_ptr<Streams> s, Allocator& memory, std::int64_t staging_bytes)
      : streams(std::move(s)),
        to_host((*streams)[Stream::ToHost]),
        to_device((*streams)[Stream::ToDevice]),
        staging(memory, *streams, staging_bytes),
        ops(memory, *streams) {}
  cuda::CopyTimes* times_of(Stream stream) {
    return stream == Stream::ToHost ? &to_host : stream == Stream::ToDevice ? &to_device : nullptr;
  }
  std::shared_ptr<Streams> streams;
  cuda::CopyTimes to_host, to_device;
  Staging staging;
  cuda::CudaOps ops;
};

std::vector<GpuInfo> cuda_gpus() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0)
    throw UsageError(fmt::format("device: value cuda, but there is no GPU here: {}; allowed: cpu",
                                 status == cudaSuccess ? "the driver lists none" : cudaGetErrorString(status)));
  std::vector<GpuInfo> gpus;
  for (int i = 0; i < count; ++i) gpus.push_back(describe_gpu(i));
  return gpus;
}

std::unique_ptr<Device> make_cuda_device(int index, std::int64_t limit) {
  const std::vector<GpuInfo> gpus = cuda_gpus();
  check(index >= 0 && index < static_cast<int>(gpus.size()), "GPU {} of {}", index, gpus.size());
  const GpuInfo& gpu = gpus[static_cast<std::size_t>(index)];
  if (gpu.major < kOldestGpu)
    throw UsageError(
        fmt::format("device: value cuda, but GPU {} ({}) has compute capability {}.{}; the program needs {}.0 or "
                    "later; allowed: cpu",
                    index, gpu.name, gpu.major, gpu.minor, kOldestGpu));
  return std::make_unique<CudaDevice>(index, limit);
}

CudaDevice::CudaDevice(int index, std::int64_t limit, std::int64_t staging_bytes)
    : CudaDevice(std::make_shared<Streams>(index), limit, staging_bytes) {}

CudaDevice::CudaDevice(std::shared_ptr<Streams> streams, std::int64_t limit, std::int64_t staging_bytes)
    : Device(Allocator::Mode::Real, limit, std::make_unique<cuda::CudaMemory>(streams)) {
  parts_ = std::make_unique<Parts>(std::move(streams), memory, staging_bytes);
}

CudaDevice::~CudaDevice() = default;

GpuOps* CudaDevice::gpu() { return &parts_->ops; }
CUstream_st* CudaDevice::stream(Stream stream) const { return (*parts_->streams)[stream]; }
int CudaDevice::index() const { return parts_->streams->device_index(); }
Event CudaDevice::record(Stream stream) { return parts_->streams->record(stream); }
void CudaDevice::wait(Stream stream, const Event& event) { parts_->streams->wait(stream, event); }

void CudaDevice::copy(Stream on, void* to, const void* from, std::int64_t bytes) {
  if (bytes == 0) return;
  cuda::CopyTimes* times = parts_->times_of(on);
  if (times) times->begin(bytes);
  check_status(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream(on)),
               "cudaMemcpyAsync");
  if (times) times->end();
}
CopyCounts CudaDevice::copies(Stream on) const {
  cuda::CopyTimes* times = parts_->times_of(on);
  return times ? times->counts() : CopyCounts();
}
void CudaDevice::zero(Stream on, void* to, std::int64_t bytes) {
  if (bytes == 0) return;
  check_status(cudaMemsetAsync(to, 0, static_cast<std::size_t>(bytes), stream(on)), "cudaMemsetAsync");
}
void CudaDevice::add(Stream on, float* sum, const float* a, const float* b, std::int64_t n) {
  cuda::add(stream(on), sum, a, b, n);
}
void CudaDevice::add(Stream on, Bf16* sum, const Bf16* a, const Bf16* b, std::int64_t n) {
  cuda::add(stream(on), sum, a, b, n);
}
void CudaDevice::round(Stream on, Bf16* to, const float* from, std::int64_t n) { cuda::round(stream(on), to, from, n); }
void CudaDevice::write(Stream on, void* to, const void* from, std::int64_t bytes) {
  parts_->staging.write(on, static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes);
}
void CudaDevice::read(Stream on, void* to, const void* from, std::int64_t bytes) {
  const Event found = parts_->ops.fetch_faults();  // before the bytes, so that the host waits once for both
  parts_->staging.read(on, static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes);
  found.wait();
  parts_->ops.throw_faults();
}
void CudaDevice::wait_with(std::weak_ptr<const Waiter> waiter) { parts_->streams->wait_with(std::move(waiter)); }

}  // namespace regather
