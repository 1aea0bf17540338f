#include "tensor/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <iterator>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace regather {
namespace {

// Under the address sanitizer what is not handed out is poisoned, and a gap after each buffer catches writes past its
// end.
#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kGap = 64;
void poison(void* data, std::size_t bytes) { ASAN_POISON_MEMORY_REGION(data, bytes); }
void unpoison(void* data, std::size_t bytes) { ASAN_UNPOISON_MEMORY_REGION(data, bytes); }
#else
constexpr std::size_t kGap = 0;
void poison(void*, std::size_t) {}
void unpoison(void*, std::size_t) {}
#endif

// The thread sanitizer has room for about 1.5 TiB of addresses in a process, which 64 ranks as threads have to share.
#if defined(__SANITIZE_THREAD__)
constexpr std::size_t kMaxCapacity = std::size_t{8} << 30;
constexpr bool kThreadSanitizer = true;
#else
constexpr std::size_t kMaxCapacity = std::size_t{1} << 46;
constexpr bool kThreadSanitizer = false;
#endif

// Reading what was never written shows as NaN in builds with assertions (but for the thread sanitizer, which is slow
// enough).
#ifdef NDEBUG
constexpr bool kFill = false;
#else
constexpr bool kFill = !kThreadSanitizer;
#endif

constexpr std::size_t kSmallUnit = 64, kLargeUnit = 4096;
constexpr std::size_t kMinCapacity = std::size_t{64} << 20;

constexpr std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

std::size_t physical_memory() {
  const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  return pages > 0 && page > 0 ? static_cast<std::size_t>(pages) * static_cast<std::size_t>(page) : kMinCapacity;
}

}  // namespace

Arena::Arena(std::size_t capacity) {
  if (capacity == 0) capacity = physical_memory();
  capacity = round_up(std::min(capacity, kMaxCapacity), kHugePage);
  // A limit on addresses (ulimit -v) may leave less than the machine's memory; what it leaves is what there is to use.
  for (;; capacity = round_up(capacity / 2, kHugePage)) {
    const std::size_t small = round_up(capacity / 8, kHugePage);
    range_bytes_ = small + capacity + kHugePage;
    range_ = mmap(nullptr, range_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range_ == MAP_FAILED) {
      range_ = nullptr;
      if (capacity <= kMinCapacity) return;  // allocate() says that there is nothing
      continue;
    }
    madvise(range_, range_bytes_, MADV_HUGEPAGE);  // advice: without huge pages everything works, slower
    const auto address = reinterpret_cast<std::uintptr_t>(range_);
    auto* begin = static_cast<std::byte*>(range_) + (round_up(address, kHugePage) - address);
    large_begin_ = begin + small;
    small_.place(begin, small, kSmallUnit);
    large_.place(large_begin_, capacity, kLargeUnit);
    return;
  }
}

Arena::~Arena() {
  if (!range_) return;
  small_.unpoison_all();
  large_.unpoison_all();
  munmap(range_, range_bytes_);
}

void* Arena::allocate(std::size_t bytes) {
  assert(bytes > 0);
  void* data = bytes < kSmall ? small_.allocate(bytes) : nullptr;
  if (!data) data = large_.allocate(bytes);
  if (!data) return nullptr;
  unpoison(data, bytes);
  if (kFill) std::memset(data, 0xff, bytes);
  return data;
}

void Arena::release(void* data, std::size_t bytes) noexcept {
  poison(data, bytes);
  (static_cast<std::byte*>(data) < large_begin_ ? small_ : large_).release(data, bytes);
}

void Arena::Heap::place(std::byte* begin, std::size_t capacity, std::size_t unit) {
  begin_ = begin;
  capacity_ = capacity;
  unit_ = unit;
}

// The addresses will be somebody else's.
void Arena::Heap::unpoison_all() { unpoison(begin_, taken_); }

// Takes what is missing from the system, so that [0, end) can be used.
bool Arena::Heap::grow(std::size_t end) {
  if (end > capacity_) return false;
  const std::size_t more = round_up(end - taken_, kHugePage);
  if (mprotect(begin_ + taken_, more, PROT_READ | PROT_WRITE) != 0) return false;
  poison(begin_ + taken_, more);
  taken_ += more;
  return true;
}

void* Arena::Heap::allocate(std::size_t bytes) {
  if (bytes > capacity_) return nullptr;
  const std::size_t size = round_up(bytes + kGap, unit_);
  const auto best = holes_.lower_bound({size, 0});
  if (best == holes_.end()) {
    const std::size_t offset = top_;
    if (offset + size > taken_ && !grow(offset + size)) return nullptr;
    blocks_.try_emplace(offset, Block{size, bytes, holes_.extract(holes_.insert({size, offset}).first)});
    top_ += size;
    return begin_ + offset;
  }
  const auto [room, offset] = *best;
  if (room > size) {  // the rest is a hole of its own
    Holes::node_type rest = holes_.extract(holes_.insert({room - size, offset + size}).first);
    blocks_.try_emplace(offset + size, Block{room - size, 0, {}});
    holes_.insert(std::move(rest));
  }
  Block& block = blocks_.find(offset)->second;
  block.entry = holes_.extract(best);
  block.size = size;
  block.requested = bytes;
  return begin_ + offset;
}

void Arena::Heap::release(void* data, [[maybe_unused]] std::size_t bytes) noexcept {
  auto block = blocks_.find(static_cast<std::size_t>(static_cast<std::byte*>(data) - begin_));
  assert(block != blocks_.end() && "released what was never allocated");
  assert(block->second.requested == bytes && "released twice, or with another size than allocated");
  Holes::node_type entry = std::move(block->second.entry);
  block->second.requested = 0;
  if (const auto next = std::next(block); next != blocks_.end() && next->second.requested == 0) {
    holes_.erase({next->second.size, next->first});
    block->second.size += next->second.size;
    blocks_.erase(next);
  }
  if (block != blocks_.begin() && std::prev(block)->second.requested == 0) {
    const auto before = std::prev(block);
    holes_.erase({before->second.size, before->first});
    before->second.size += block->second.size;
    blocks_.erase(block);
    block = before;
  }
  if (block->first + block->second.size == top_) {
    top_ = block->first;
    blocks_.erase(block);
    return;
  }
  entry.value() = {block->second.size, block->first};
  holes_.insert(std::move(entry));
}

}  // namespace regather
