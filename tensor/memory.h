// The allocator owns every byte of a rank: it counts each by kind (tag), live and peak, and refuses a request over the
// limit with a table of who holds what. Invariant: live(tag) is the sum of the requested bytes of that tag's live
// buffers, never a rounded figure; so the storage-less run (Mode::Meta, same calls, no memory) predicts it to the byte.
// On the host storage comes from two reserved address ranges in 2 MiB-aligned huge pages, one for parameters and their
// kin, one for values and scratch; best fit, neighbours merged; what is freed stays for the next request, so a repeated
// step takes nothing from the system (system_bytes() stays put). Not thread-safe on purpose: only the thread that runs
// the step allocates and frees.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace regather {

// Parameters: shards (or replicas). Gathered: full copies in slots. Gradients: what outlives a block's backward.
// Activations: values of forward. Workspace: scratch, activation gradients, a full gradient until its reduction,
// batches. Host: offloaded values; not counted in the device totals.
enum class Tag : std::uint8_t { Parameters, Gathered, Gradients, Optimizer, Activations, Workspace, Host };
inline constexpr std::size_t kNumTags = 7;
inline constexpr std::array<Tag, kNumTags> kAllTags = {Tag::Parameters,  Tag::Gathered,  Tag::Gradients, Tag::Optimizer,
                                                       Tag::Activations, Tag::Workspace, Tag::Host};
std::string_view name_of(Tag tag);  // "parameters", ... as in summary.json

using BytesByTag = std::array<std::int64_t, kNumTags>;
inline constexpr std::size_t index(Tag tag) { return static_cast<std::size_t>(tag); }

// Where an allocator's bytes come from: the host's memory (tensor/arena.h), or a device's.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  virtual void* allocate(std::size_t bytes, Tag tag) = 0;  // null: there is no more
  virtual void release(void* data, std::size_t bytes, Tag tag) noexcept = 0;
  virtual std::size_t system_bytes() const = 0;
};

class Allocator {
 public:
  enum class Mode { Real, Meta };
  // One allocation (+) or release (-), in order; what a memory timeline is drawn from.
  struct Event {
    Tag tag;
    std::int64_t bytes;
    bool operator==(const Event&) const = default;
  };

  // limit: bytes of all tags except Host; 0: none. source: none is the host's memory.
  explicit Allocator(Mode mode = Mode::Real, std::int64_t limit = 0, std::unique_ptr<MemorySource> source = nullptr);
  ~Allocator();
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  // Null in Meta mode and for zero bytes. Throws OutOfMemory over the limit, or when the system has no more.
  void* allocate(std::int64_t bytes, Tag tag);
  void release(void* data, std::int64_t bytes, Tag tag) noexcept;

  bool meta() const { return mode_ == Mode::Meta; }
  std::int64_t limit() const { return limit_; }
  void set_limit(std::int64_t bytes) { limit_ = bytes; }
  std::int64_t live(Tag tag) const { return live_[index(tag)]; }
  std::int64_t peak(Tag tag) const { return peak_[index(tag)]; }  // that tag's own high-water mark
  std::int64_t live_total() const { return total_; }              // all tags except Host
  std::int64_t peak_total() const { return peak_total_; }
  const BytesByTag& at_peak() const { return at_peak_; }  // by tag, at the moment of peak_total()
  const BytesByTag& live_by_tag() const { return live_; }
  const BytesByTag& peak_by_tag() const { return peak_; }
  void restart_peaks();
  std::int64_t system_bytes() const;  // taken from the system so far

  std::vector<Event>* log = nullptr;  // appended to when set

  // Who asks, for the out-of-memory message: `const Asking asking(memory, "linear (mlp.up)");`
  class Asking {
   public:
    Asking(Allocator& memory, std::string_view who) : memory_(memory), before_(memory.asking_) { memory.asking_ = who; }
    ~Asking() { memory_.asking_ = before_; }
    Asking(const Asking&) = delete;
    Asking& operator=(const Asking&) = delete;

   private:
    Allocator& memory_;
    std::string_view before_;
  };

 private:
  void count(Tag tag, std::int64_t bytes);
  [[noreturn]] void refuse(std::int64_t bytes, Tag tag, std::string_view why) const;

  Mode mode_;
  std::int64_t limit_;
  BytesByTag live_{}, peak_{}, at_peak_{};
  std::int64_t total_ = 0, peak_total_ = 0;
  std::string_view asking_;
  std::unique_ptr<MemorySource> source_;
};

// Owns one allocation; move-only. data() is null in Meta mode.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Allocator& memory, std::int64_t bytes, Tag tag)
      : memory_(&memory), data_(memory.allocate(bytes, tag)), bytes_(bytes), tag_(tag) {}
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer moved(std::move(other));
    swap(moved);
    return *this;
  }
  ~Buffer() {
    if (memory_) memory_->release(data_, bytes_, tag_);
  }
  explicit operator bool() const { return memory_ != nullptr; }
  template <class T = std::byte>
  T* data() const {
    return static_cast<T*>(data_);
  }
  std::int64_t bytes() const { return bytes_; }
  Tag tag() const { return tag_; }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(tag_, other.tag_);
  }
  Allocator* memory_ = nullptr;
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
  Tag tag_ = Tag::Workspace;
};

}  // namespace regather
