#include "tensor/memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <iterator>

#include "tensor/arena.h"
#include "tensor/error.h"

namespace regather {
namespace {

std::string human(std::int64_t bytes) {
  if (bytes < 1024) return fmt::format("{} bytes", bytes);
  constexpr std::array<std::string_view, 5> kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return fmt::format("{:.2f} {}", value, kUnits[unit]);
}

// What holds parameters, their copies, gradients and moments comes and goes in a few sizes, block by block; what
// operations make, in many. In one range a value kept from forward would sit in the hole that a full copy left and
// comes back to.
class HostMemory final : public MemorySource {
 public:
  void* allocate(std::size_t bytes, Tag tag) override { return of(tag).allocate(bytes); }
  void release(void* data, std::size_t bytes, Tag tag) noexcept override { of(tag).release(data, bytes); }
  std::size_t system_bytes() const override { return states_.system_bytes() + values_.system_bytes(); }

 private:
  Arena& of(Tag tag) { return tag == Tag::Activations || tag == Tag::Workspace ? values_ : states_; }

  Arena states_, values_;
};

}  // namespace

std::string_view name_of(Tag tag) {
  switch (tag) {
    case Tag::Parameters: return "parameters";
    case Tag::Gathered: return "gathered";
    case Tag::Gradients: return "gradients";
    case Tag::Optimizer: return "optimizer";
    case Tag::Activations: return "activations";
    case Tag::Workspace: return "workspace";
    case Tag::Host: return "host";
  }
  return "?";
}

Allocator::Allocator(Mode mode, std::int64_t limit, std::unique_ptr<MemorySource> source)
    : mode_(mode), limit_(limit), source_(std::move(source)) {}

Allocator::~Allocator() { assert(total_ == 0 && live_[index(Tag::Host)] == 0 && "a buffer outlives its allocator"); }

void* Allocator::allocate(std::int64_t bytes, Tag tag) {
  check(bytes >= 0, "an allocation of {} bytes ({})", bytes, name_of(tag));
  if (bytes == 0) return nullptr;
  if (limit_ > 0 && tag != Tag::Host && bytes > limit_ - total_) refuse(bytes, tag, "over the limit");
  if (log) log->push_back({tag, bytes});
  void* data = nullptr;
  if (mode_ == Mode::Real) {
    if (!source_) source_ = std::make_unique<HostMemory>();
    data = source_->allocate(static_cast<std::size_t>(bytes), tag);
    if (!data) {
      if (log) log->pop_back();
      refuse(bytes, tag, "the system has no more");
    }
  }
  count(tag, bytes);
  return data;
}

void Allocator::release(void* data, std::int64_t bytes, Tag tag) noexcept {
  if (bytes == 0) return;
  assert(bytes > 0 && live_[index(tag)] >= bytes && "released more of a tag than is live");
  assert((data != nullptr) == (mode_ == Mode::Real));
  if (log) log->push_back({tag, -bytes});
  count(tag, -bytes);
  if (data) source_->release(data, static_cast<std::size_t>(bytes), tag);
}

void Allocator::count(Tag tag, std::int64_t bytes) {
  std::int64_t& live = live_[index(tag)];
  live += bytes;
  peak_[index(tag)] = std::max(peak_[index(tag)], live);
  if (tag == Tag::Host) return;
  total_ += bytes;
  if (total_ > peak_total_) {
    peak_total_ = total_;
    at_peak_ = live_;
  }
}

void Allocator::restart_peaks() {
  peak_ = at_peak_ = live_;
  peak_total_ = total_;
}

std::int64_t Allocator::system_bytes() const {
  return source_ ? static_cast<std::int64_t>(source_->system_bytes()) : 0;
}

void Allocator::refuse(std::int64_t bytes, Tag tag, std::string_view why) const {
  std::string text;
  const auto out = std::back_inserter(text);
  fmt::format_to(out, "out of memory: {} asks for {} of {} ({} bytes), {}\n",
                 asking_.empty() ? std::string_view("a request") : asking_, human(bytes), name_of(tag), bytes, why);
  fmt::format_to(out, "  {:<12} {:>12} {:>12} {:>16}\n", "", "in use", "peak", "bytes in use");
  const auto row = [&](std::string_view name, std::int64_t live, std::int64_t peak) {
    fmt::format_to(out, "  {:<12} {:>12} {:>12} {:>16}\n", name, human(live), human(peak), live);
  };
  for (const Tag t : kAllTags) {
    if (t != Tag::Host) row(name_of(t), live(t), peak(t));
  }
  row("total", total_, peak_total_);
  if (peak(Tag::Host) > 0) row("host", live(Tag::Host), peak(Tag::Host));
  if (limit_ > 0) {
    const std::int64_t free = std::max<std::int64_t>(limit_ - total_, 0);
    fmt::format_to(out, "  the limit is {} ({} bytes), {} of it free", human(limit_), limit_, human(free));
  } else {
    fmt::format_to(out, "  no limit is set; {} were taken from the system", human(system_bytes()));
  }
  throw OutOfMemory(std::move(text));
}

}  // namespace regather
