#include "tensor/params.h"

#include <algorithm>

namespace regather {

UnitGradients::UnitGradients(Device& device, std::vector<std::int64_t> offsets, std::int64_t elements, Tag tag)
    : offsets_(std::move(offsets)),
      written_(offsets_.size(), false),
      elements_(elements),
      buffer_(device.memory, elements * static_cast<std::int64_t>(sizeof(float)), tag) {
  clear(device);
}

void UnitGradients::clear(Device& device) {
  std::fill(written_.begin(), written_.end(), false);
  device.zero(Stream::Compute, buffer_.data<float>(), buffer_.bytes());
}

float* UnitGradients::data(int i) {
  const auto k = static_cast<std::size_t>(i);
  if (offsets_.at(k) < 0) return nullptr;
  written_[k] = true;
  float* flat = buffer_.data<float>();
  return flat ? flat + offsets_[k] : nullptr;
}

}  // namespace regather
