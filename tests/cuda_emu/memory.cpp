#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>

#include "tests/cuda_emu/sanitizers.h"
#include "tests/cuda_emu/state.h"

namespace cuda_emu {
namespace {

constexpr std::size_t kReserved = std::size_t{64} << 30, kUnit = 256, kPage = 4096;
constexpr int kNaN = 0xff;  // in every byte: a NaN in every float type

std::size_t rounded(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

DeviceMemory::DeviceMemory(std::size_t device_capacity, bool guarded) : capacity(device_capacity), guarded_(guarded) {
  const int access = guarded ? PROT_NONE : PROT_READ | PROT_WRITE;
  void* range = mmap(nullptr, kReserved, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) throw std::bad_alloc();
  begin_ = static_cast<char*>(range);
}
DeviceMemory::~DeviceMemory() {
  unpoison(begin_, top_);
  munmap(begin_, kReserved);
}

void DeviceMemory::open() {
  if (guarded_ && openings_++ == 0 && top_ > 0) mprotect(begin_, rounded(top_, kPage), PROT_READ | PROT_WRITE);
}
void DeviceMemory::close() {
  if (guarded_ && --openings_ == 0 && top_ > 0) mprotect(begin_, rounded(top_, kPage), PROT_NONE);
}

void* DeviceMemory::allocate(std::size_t bytes) {
  const std::size_t room = rounded(std::max<std::size_t>(bytes, 1), kUnit);
  if (used + room > capacity || top_ + room + kUnit > kReserved) return nullptr;
  char* data = begin_ + top_;
  top_ += room + kUnit;  // nothing lies between two blocks
  if (guarded_ && openings_ > 0) mprotect(begin_, rounded(top_, kPage), PROT_READ | PROT_WRITE);
  const auto number = static_cast<std::int64_t>(blocks_.size());
  blocks_[data] = {bytes, true, number};
  used += room;
  peak = std::max(peak, used);
  unpoison(data, bytes);
  poison(data + bytes, room - bytes + kUnit);
  return data;
}

void DeviceMemory::fill(void* data) {
  open();
  std::memset(data, kNaN, std::min(kMostFilled, blocks_.at(static_cast<const char*>(data)).bytes));
  close();
}

bool DeviceMemory::contains(const void* data) const { return data >= begin_ && data < begin_ + kReserved; }

const std::pair<const char* const, DeviceMemory::Block>* DeviceMemory::block_at(const void* data) const {
  const auto after = blocks_.upper_bound(static_cast<const char*>(data));
  return after == blocks_.begin() ? nullptr : &*std::prev(after);
}

std::size_t DeviceMemory::size_of(const void* data) const {
  const auto found = blocks_.find(static_cast<const char*>(data));
  return found != blocks_.end() && found->second.live ? found->second.bytes : 0;
}

std::string DeviceMemory::release(void* data) {
  const auto* found = block_at(data);
  if (!found || found->first != data) return "free of a pointer that was not allocated";
  Block& block = blocks_.at(found->first);
  if (!block.live) return fmt::format("double free of allocation {}", block.number);
  block.live = false;
  used -= rounded(std::max<std::size_t>(block.bytes, 1), kUnit);
  open();
  std::memset(data, kNaN, std::min(kMostFilled, block.bytes));
  close();
  poison(data, block.bytes);
  // Whole pages go back to the system.
  char* const first = begin_ + rounded(static_cast<std::size_t>(static_cast<char*>(data) - begin_), kPage);
  char* const end = static_cast<char*>(data) + block.bytes;
  if (end - first >= static_cast<std::ptrdiff_t>(kPage))
    madvise(first, static_cast<std::size_t>(end - first) / kPage * kPage, MADV_DONTNEED);
  return {};
}

std::string DeviceMemory::find_fault(const void* data, std::size_t bytes) const {
  const auto* found = block_at(data);
  if (!found) return fmt::format("out of bounds: {} bytes where nothing was allocated", bytes);
  const Block& block = found->second;
  const std::size_t offset = static_cast<std::size_t>(static_cast<const char*>(data) - found->first);
  if (offset + bytes > block.bytes)
    return fmt::format("out of bounds: {} bytes at offset {} of allocation {}, which has {}", bytes, offset,
                       block.number, block.bytes);
  if (!block.live) return fmt::format("use after free of allocation {}", block.number);
  return {};
}

bool State::on_device(const void* data) const {
  return std::any_of(devices.begin(), devices.end(), [&](const auto& d) { return d->contains(data); });
}

bool State::is_pinned(const void* data) const {
  const auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return static_cast<const char*>(data) < begin + bytes;
}

std::string State::find_fault(const void* data, std::size_t bytes) const {
  for (const auto& device : devices)
    if (device->contains(data)) return device->find_fault(data, bytes);
  return {};
}

bool State::check(const void* data, std::size_t bytes, const std::string& who) {
  const std::string fault = bytes == 0 ? std::string() : find_fault(data, bytes);
  if (!fault.empty()) report(who + ": " + fault);
  return fault.empty();
}

}  // namespace cuda_emu
