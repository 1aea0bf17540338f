// Where an allocator's storage comes from: one address range, reserved once (to the size of the machine's memory;
// reserving costs nothing) and taken from the system bottom up in 2 MiB steps, in transparent huge pages where the
// system has them. Requests below 32 KiB live at one end of the range in units of 64 bytes, the others in units of 4
// KiB, so that small values do not cut up the room of large ones. Best fit, the lowest address first; neighbouring
// holes are always merged. What is above the topmost buffer is used only when no hole fits, so that where a buffer goes
// depends on the buffers in use alone: the same requests from the same state go to the same places and take nothing
// more from the system. Invariant: the blocks of a heap cover [0, top) without gap or overlap, no two holes side by
// side, none at the top. It counts no tags and knows no limit: that is the Allocator's. Not thread-safe.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace regather {

class Arena {
 public:
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;
  static constexpr std::size_t kSmall = std::size_t{32} << 10;  // requests below it are small

  // capacity: most bytes of large buffers there can be at a time; 0: as much as the machine has memory.
  explicit Arena(std::size_t capacity = 0);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Uninitialised (all ones, a NaN in every float type, in debug builds). Null when the range or the system
  // has no more. bytes > 0.
  void* allocate(std::size_t bytes);
  void release(void* data, std::size_t bytes) noexcept;
  std::size_t system_bytes() const { return small_.taken() + large_.taken(); }

 private:
  // A part of the range: offsets from its begin.
  class Heap {
   public:
    void place(std::byte* begin, std::size_t capacity, std::size_t unit);
    void* allocate(std::size_t bytes);
    void release(void* data, std::size_t bytes) noexcept;
    std::size_t taken() const { return taken_; }
    void unpoison_all();

   private:
    using Holes = std::set<std::pair<std::size_t, std::size_t>>;  // (size, offset)
    // A block in use keeps the node that enters it in holes_ later, so that release() allocates nothing and cannot
    // fail.
    struct Block {
      std::size_t size;
      std::size_t requested;  // 0: a hole
      Holes::node_type entry;
    };
    using Blocks = std::map<std::size_t, Block>;  // by offset

    bool grow(std::size_t end);

    std::byte* begin_ = nullptr;
    std::size_t capacity_ = 0, unit_ = 0;
    std::size_t top_ = 0, taken_ = 0;  // end of the last block; end of what the system gave
    Blocks blocks_;
    Holes holes_;
  };

  void* range_ = nullptr;
  std::size_t range_bytes_ = 0;
  std::byte* large_begin_ = nullptr;
  Heap small_, large_;
};

}  // namespace regather
