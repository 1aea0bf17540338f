// What the threads of a launch touch: shared memory, and global memory, of which every access is checked and counted.
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>

#include "tests/cuda_emu/grid.h"
#include "tests/cuda_emu/sanitizers.h"

namespace cuda_emu {
namespace {
constexpr std::size_t kSector = 32;
}  // namespace

SharedVariable::SharedVariable(const void* key, std::size_t bytes) : key_(key), bytes_(bytes) {
  data_ = kThreadSanitizer
              ? static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))
              : new char[bytes];
  std::fill_n(data_, bytes, '\xff');
  release(data_);
}
SharedVariable::~SharedVariable() {
  if (kThreadSanitizer)
    munmap(data_, bytes_);
  else
    delete[] data_;
}

void* Grid::shared_memory(const void* key, std::size_t bytes) {
  std::size_t statics = key == this ? 0 : bytes;
  for (const auto& variable : shared_) {
    if (variable->key() == key) {
      if (apart_) acquire(variable->data());
      return variable->data();
    }
    if (variable->key() != this) statics += variable->bytes();
  }
  if (statics > kStaticShared)
    fault(fmt::format("{} bytes of static shared memory; a block has {}", statics, kStaticShared));
  if (statics + dynamic_bytes_ > shared_limit_)
    fault(fmt::format("{} bytes of static and {} of dynamic shared memory; a block of this launch has {}", statics,
                      dynamic_bytes_, shared_limit_));
  return shared_.emplace_back(std::make_unique<SharedVariable>(key, bytes))->data();
}

void* Grid::dynamic_shared_memory() {
  if (dynamic_bytes_ == 0) fault("it asks for dynamic shared memory and was launched without");
  return shared_memory(this, dynamic_bytes_);
}

const SharedVariable* Grid::shared_at(const void* data) const {
  for (const auto& variable : shared_)
    if (data >= variable->data() && data < variable->data() + variable->bytes()) return variable.get();
  return nullptr;
}

void Grid::check_shared(const void* data, std::size_t bytes, Place place) {
  const SharedVariable* variable = shared_at(data);
  const bool inside = variable && static_cast<const char*>(data) + bytes <= variable->data() + variable->bytes();
  const bool aligned = reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
  if (!inside || !aligned)
    fault(fmt::format("{} bytes of a matrix {}, in thread {}, at {}", bytes,
                      inside ? "are not aligned" : "are not in shared memory", this_thread->linear, text_of(place)));
}

// Atomics may be on shared memory, too, which is checked and not counted.
std::string Grid::fault_of(Access access, const void* data, std::size_t bytes) const {
  if (reinterpret_cast<std::uintptr_t>(data) % bytes != 0)
    return fmt::format("misaligned: {} bytes at an address that is no multiple of it", bytes);
  if (state_.on_device(data)) return state_.find_fault(data, bytes);
  const SharedVariable* variable = access == Access::Atomic ? shared_at(data) : nullptr;
  if (!variable) return "a pointer of the host";
  const bool inside = static_cast<const char*>(data) + bytes <= variable->data() + variable->bytes();
  return inside ? "" : fmt::format("out of bounds: {} bytes at the end of shared memory", bytes);
}

void Grid::count_access(Access access, const void* data, std::size_t bytes, const void* instruction) {
  static constexpr std::array<const char*, 3> kNames{"load", "store", "atomic"};
  if (const std::string wrong = fault_of(access, data, bytes); !wrong.empty())
    fault(fmt::format("{} in block ({}, {}, {}), thread {}: {}", kNames[static_cast<std::size_t>(access)],
                      this_thread->block.x, this_thread->block.y, this_thread->block.z, this_thread->linear, wrong));
  if (!state_.on_device(data)) return;
  const std::uint64_t first = reinterpret_cast<std::uintptr_t>(data) / kSector,
                      last = (reinterpret_cast<std::uintptr_t>(data) + bytes - 1) / kSector;
  auto& times = times_[static_cast<std::size_t>(this_thread->linear)];
  auto time = std::find_if(times.begin(), times.end(), [&](const auto& t) { return t.first == instruction; });
  if (time == times.end()) time = times.emplace(time, instruction, 0);
  ++time->second;
  const auto count = [&](std::int64_t& counted, std::vector<Touched>& sectors) {
    counted += static_cast<std::int64_t>(bytes);
    for (std::uint64_t s = first; s <= last; ++s) sectors.emplace_back(instruction, time->second, s);
  };
  if (access != Access::Store) count(counts_.loaded, loaded_[warp()]);
  if (access != Access::Load) count(counts_.stored, stored_[warp()]);
}

// Lanes that touch one sector in the same access move it once.
void Grid::count_sectors() {
  const auto distinct = [](std::vector<std::vector<Touched>>& warps) {
    std::int64_t n = 0;
    for (auto& sectors : warps) {
      std::sort(sectors.begin(), sectors.end());
      n += std::unique(sectors.begin(), sectors.end()) - sectors.begin();
    }
    return n;
  };
  counts_.loaded_sectors += distinct(loaded_);
  counts_.stored_sectors += distinct(stored_);
}

// Load and store are inlined: where this returns to is the access in the kernel.
void count_access(Access access, const void* data, std::size_t bytes) {
  const DeviceCall call;
  call.grid.count_access(access, data, bytes, __builtin_return_address(0));
}
void* shared_memory(const void* key, std::size_t bytes) {
  const DeviceCall call;
  return call.grid.shared_memory(key, bytes);
}
void* dynamic_shared_memory() {
  const DeviceCall call;
  return call.grid.dynamic_shared_memory();
}

}  // namespace cuda_emu
