// The CUDA runtime: the symbols of cudart that the backend uses, declared by NVIDIA's own header, so that signatures
// cannot drift. A function that is not here is an error of the linker.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "tests/cuda_emu/sanitizers.h"
#include "tests/cuda_emu/state.h"

using cuda_emu::state;

struct CUmemPoolHandle_st {
  int device;
};

namespace {

cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess) state().host().last_error = error;
  return error;
}

// What the calling process is told by every call, once its context has failed.
cudaError_t of_context() { return state().host().context->failed ? cudaErrorIllegalAddress : cudaSuccess; }

cuda_emu::DeviceMemory& memory_of(int device) { return *state().devices.at(static_cast<std::size_t>(device)); }

void free_block(void* data) {
  for (const auto& device : state().devices) {
    if (!device->contains(data)) continue;
    if (const std::string fault = device->release(data); !fault.empty()) state().report(fault);
    return;
  }
  state().report("free of a pointer that was not allocated");
}

// What is done to all of a block.
void will_write_all(void* data, std::size_t bytes) {
  cuda_emu::will_write(data, std::min(bytes, cuda_emu::DeviceMemory::kMostFilled));
}

cudaError_t allocate(void** data, std::size_t bytes, int device) {
  *data = memory_of(device).allocate(bytes);
  if (!*data) return failed(cudaErrorMemoryAllocation);
  ++state().ledger.allocations.calls;
  state().ledger.allocations.bytes += static_cast<std::int64_t>(bytes);
  return cudaSuccess;
}

bool exists(cudaEvent_t event, const char* who) {
  const bool found = event && !event->destroyed;
  if (!found) state().report(fmt::format("{} of {}", who, event ? "an event that was destroyed" : "no event"));
  return found;
}

// Empty if these bytes do not leave the block of pinned memory that they begin in.
std::string fault_of_pinned(const void* data, std::size_t bytes) {
  const auto& pinned = state().pinned;
  const auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return {};
  const auto& [begin, size] = *std::prev(after);
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(data) - begin);
  if (offset >= size || bytes <= size - offset) return {};
  return fmt::format("out of bounds: {} bytes at offset {} of {} bytes of pinned memory", bytes, offset, size);
}

cudaError_t wait_for_stream(cudaStream_t stream, const char* who) {
  const auto last = stream->last;
  const bool done = state().wait_until([=] { return stream->done >= last; }, who);
  cuda_emu::acquire(stream);
  return done ? of_context() : failed(cudaErrorLaunchFailure);
}

}  // namespace

#define API extern "C" cudaError_t
#define END_IF_FAILED \
  if (const cudaError_t error = of_context(); error != cudaSuccess) return error

// ---- errors and devices ---------------------------------------------------------------------------------------------

API cudaGetLastError() {
  END_IF_FAILED;
  return std::exchange(state().host().last_error, cudaSuccess);
}
API cudaPeekAtLastError() {
  END_IF_FAILED;
  return state().host().last_error;
}
extern "C" const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    default: return "cudaError";
  }
}
extern "C" const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorNotReady: return "device not ready";
    default: return "emulated error";
  }
}
API cudaGetDeviceCount(int* count) {
  END_IF_FAILED;
  *count = static_cast<int>(state().devices.size());
  return *count > 0 ? cudaSuccess : failed(cudaErrorNoDevice);
}
API cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  END_IF_FAILED;
  if (device < 0 || device >= static_cast<int>(state().devices.size())) return failed(cudaErrorInvalidDevice);
  *properties = {};
  std::strcpy(properties->name, "emulated GPU");
  properties->uuid.bytes[0] = static_cast<char>(device);
  properties->totalGlobalMem = state().options.capacity;
  properties->major = 8;  // what its limits are those of
  properties->multiProcessorCount = 108;
  return cudaSuccess;
}
API cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  END_IF_FAILED;
  if (device < 0 || device >= static_cast<int>(state().devices.size())) return failed(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrClockRate: *value = 1410000; return cudaSuccess;
    case cudaDevAttrMemoryClockRate: *value = 1215000; return cudaSuccess;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; return cudaSuccess;
    default: return failed(cudaErrorInvalidValue);
  }
}
API cudaSetDevice(int device) {
  END_IF_FAILED;
  if (device < 0 || device >= static_cast<int>(state().devices.size())) return failed(cudaErrorInvalidDevice);
  state().host().device = device;
  return cudaSuccess;
}
API cudaGetDevice(int* device) {
  END_IF_FAILED;
  *device = state().host().device;
  return cudaSuccess;
}
API cudaDeviceSynchronize() {
  END_IF_FAILED;
  cudaError_t result = cudaSuccess;
  for (CUstream_st* stream : std::vector(state().streams))
    if (stream->device == state().host().device) result = std::max(result, wait_for_stream(stream, __func__));
  return result;
}
API cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  END_IF_FAILED;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      static_cast<std::size_t>(value) > cuda_emu::kMostShared)
    return failed(cudaErrorInvalidValue);
  state().dynamic_shared_limits[kernel] = static_cast<std::size_t>(value);
  return cudaSuccess;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

API cudaMalloc(void** data, std::size_t bytes) {
  END_IF_FAILED;
  const int device = state().host().device;
  const cudaError_t result = allocate(data, bytes, device);
  if (result == cudaSuccess) memory_of(device).fill(*data);
  return result;
}
API cudaFree(void* data) {
  END_IF_FAILED;
  if (!data) return cudaSuccess;
  cudaDeviceSynchronize();
  free_block(data);
  return cudaSuccess;
}
API cudaMallocAsync(void** data, std::size_t bytes, cudaStream_t stream) {
  END_IF_FAILED;
  const cudaError_t result = allocate(data, bytes, stream->device);
  if (result == cudaSuccess)
    state().enqueue(stream, __func__, [block = *data, bytes, device = stream->device] {
      will_write_all(block, bytes);
      memory_of(device).fill(block);
    });
  return result;
}
API cudaFreeAsync(void* data, cudaStream_t stream) {
  END_IF_FAILED;
  state().enqueue(stream, __func__, [data, &memory = memory_of(stream->device)] {
    will_write_all(data, memory.size_of(data));
    free_block(data);
  });
  return cudaSuccess;
}
API cudaMallocFromPoolAsync(void** data, std::size_t bytes, cudaMemPool_t, cudaStream_t stream) {
  return cudaMallocAsync(data, bytes, stream);
}
API cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
  END_IF_FAILED;
  *pool = new CUmemPoolHandle_st{properties->location.id};
  return cudaSuccess;
}
API cudaMemPoolDestroy(cudaMemPool_t pool) {
  delete pool;
  return of_context();
}
API cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return of_context(); }
API cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  END_IF_FAILED;
  if (attribute != cudaMemPoolAttrReservedMemCurrent) return failed(cudaErrorInvalidValue);
  const std::uint64_t reserved = memory_of(pool->device).peak;
  std::memcpy(value, &reserved, sizeof reserved);
  return cudaSuccess;
}
API cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  END_IF_FAILED;
  const cuda_emu::DeviceMemory& memory = memory_of(state().host().device);
  *total = memory.capacity;
  *free = memory.capacity - memory.used;
  return cudaSuccess;
}
API cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  END_IF_FAILED;
  *data = ::operator new(bytes, std::nothrow);
  if (!*data) return failed(cudaErrorMemoryAllocation);
  std::memset(*data, 0xff, bytes);
  state().pinned[static_cast<const char*>(*data)] = bytes;
  return cudaSuccess;
}
API cudaFreeHost(void* data) {
  END_IF_FAILED;
  if (state().pinned.erase(static_cast<const char*>(data)) == 0)
    state().report("cudaFreeHost of a pointer that was not allocated");
  else
    ::operator delete(data);
  return cudaSuccess;
}

API cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  END_IF_FAILED;
  cuda_emu::State& s = state();
  const bool to_device = s.on_device(to), from_device = s.on_device(from);
  const bool to_pinned = s.is_pinned(to), from_pinned = s.is_pinned(from);
  const cudaMemcpyKind actual = to_device ? (from_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice)
                                          : (from_device ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost);
  const std::string name = actual == cudaMemcpyDeviceToDevice ? "device to device"
                           : actual == cudaMemcpyHostToDevice ? "host to device"
                           : actual == cudaMemcpyDeviceToHost ? "device to host"
                                                              : "host to host";
  if (kind != actual && kind != cudaMemcpyDefault) {
    s.report(fmt::format("copy of {} bytes is {}, which is not what was asked for", bytes, name));
    return failed(cudaErrorInvalidMemcpyDirection);
  }
  if ((!to_device && !to_pinned) || (!from_device && !from_pinned))
    s.report(
        fmt::format("copy {} of {} bytes with memory that is not pinned: it would wait for the device", name, bytes));
  for (const void* end : {static_cast<const void*>(to), from})
    if (const std::string fault = s.on_device(end) ? "" : fault_of_pinned(end, bytes); !fault.empty()) {
      s.report(fmt::format("copy {}, {}: {}", name, end == to ? "target" : "source", fault));
      return failed(cudaErrorInvalidValue);
    }
  s.enqueue(stream, "copy " + name, [=, &s] {
    if (!s.check(to, bytes, "copy " + name + ", target") || !s.check(from, bytes, "copy " + name + ", source")) return;
    if ((to_pinned && !s.is_pinned(to)) || (from_pinned && !s.is_pinned(from)))
      return s.report("copy " + name + ": use after free of pinned memory");
    cuda_emu::will_read(from, bytes);
    cuda_emu::will_write(to, bytes);
    std::memcpy(to, from, bytes);
    ++s.ledger.copies[name].calls;
    s.ledger.copies[name].bytes += static_cast<std::int64_t>(bytes);
  });
  return cudaSuccess;
}
API cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
  END_IF_FAILED;
  cuda_emu::State& s = state();
  s.enqueue(stream, "set", [=, &s] {
    if (!s.check(data, bytes, "set")) return;
    cuda_emu::will_write(data, bytes);
    std::memset(data, value, bytes);
    ++s.ledger.copies["set"].calls;
    s.ledger.copies["set"].bytes += static_cast<std::int64_t>(bytes);
  });
  return cudaSuccess;
}
API cudaMemset2DAsync(void* data, std::size_t pitch, int value, std::size_t width, std::size_t height,
                      cudaStream_t stream) {
  END_IF_FAILED;
  if (width > pitch) return failed(cudaErrorInvalidValue);
  for (std::size_t row = 0; row < height; ++row)
    cudaMemsetAsync(static_cast<char*>(data) + row * pitch, value, width, stream);
  return cudaSuccess;
}

// ---- streams and events ---------------------------------------------------------------------------------------------

API cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  END_IF_FAILED;
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
API cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags,
                                 int) {  // any order is one that a device may take
  return cudaStreamCreateWithFlags(stream, flags);
}
API cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  END_IF_FAILED;
  cuda_emu::State& s = state();
  if (flags != cudaStreamNonBlocking) s.report("a stream that waits for the legacy default stream");
  *stream = s.all_streams
                .emplace_back(
                    std::make_unique<CUstream_st>(CUstream_st{s.host().device, s.next_stream++, s.host().context, {}}))
                .get();
  (*stream)->priority = s.random();
  (*stream)->fiber = cuda_emu::new_fiber();  // here: a new fiber comes after whoever makes it
  s.streams.push_back(*stream);
  return cudaSuccess;
}
API cudaStreamDestroy(cudaStream_t stream) {
  END_IF_FAILED;
  state().destroy(*stream);
  return cudaSuccess;
}
API cudaStreamSynchronize(cudaStream_t stream) { return wait_for_stream(stream, __func__); }
API cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  END_IF_FAILED;
  *event = state().events.emplace_back(std::make_unique<CUevent_st>()).get();
  return cudaSuccess;
}
API cudaEventDestroy(cudaEvent_t event) {
  END_IF_FAILED;
  if (!exists(event, __func__)) return failed(cudaErrorInvalidResourceHandle);
  event->destroyed = true;
  return cudaSuccess;
}
API cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  END_IF_FAILED;
  if (!exists(event, __func__)) return failed(cudaErrorInvalidResourceHandle);
  event->latest = std::make_shared<cuda_emu::Record>();
  state().enqueue(stream, __func__, [record = event->latest] {
    record->done = true;
    cuda_emu::release(record.get());
  });
  return cudaSuccess;
}
API cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  END_IF_FAILED;
  if (!exists(event, __func__)) return failed(cudaErrorInvalidResourceHandle);
  if (const auto record = event->latest)
    state().enqueue(
        stream, __func__, [record] { cuda_emu::acquire(record.get()); }, [record] { return record->done; });
  return cudaSuccess;
}
API cudaEventSynchronize(cudaEvent_t event) {
  END_IF_FAILED;
  if (!exists(event, __func__)) return failed(cudaErrorInvalidResourceHandle);
  const auto record = event->latest;
  if (!record) return cudaSuccess;
  const bool done = state().wait_until([record] { return record->done; }, __func__);
  cuda_emu::acquire(record.get());
  return done ? of_context() : failed(cudaErrorLaunchFailure);
}
API cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  END_IF_FAILED;
  if (!exists(begin, __func__) || !exists(end, __func__)) return failed(cudaErrorInvalidResourceHandle);
  for (const cudaEvent_t event : {begin, end})
    if (!event->done()) return cudaErrorNotReady;
  *milliseconds = 1;  // there is no time here
  return cudaSuccess;
}
API cudaEventQuery(cudaEvent_t event) {
  END_IF_FAILED;
  if (!exists(event, __func__)) return failed(cudaErrorInvalidResourceHandle);
  if (!event->done() && !state().poll(__func__)) return failed(cudaErrorLaunchFailure);
  END_IF_FAILED;
  if (!event->done()) return cudaErrorNotReady;
  cuda_emu::acquire(event->latest.get());
  return cudaSuccess;
}
