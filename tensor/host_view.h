// The host's side of what a device holds: in place where the device's memory is the host's, through a copy elsewhere.
// Both are after what was enqueued on the compute stream. It converts and interprets nothing.
#pragma once
#include <span>
#include <vector>

#include "tensor/device.h"
#include "tensor/tensor.h"

namespace regather {

// n elements to read; nothing in a meta run. In place, the device's memory has to stay as long as the view.
template <class T>
class HostView {
 public:
  HostView(Device& device, const T* from, std::int64_t n) {
    if (device.meta() || n == 0) return;
    if (device.kind() == DeviceKind::Cpu) {
      values_ = {from, static_cast<std::size_t>(n)};
      return;
    }
    copy_.resize(static_cast<std::size_t>(n));
    device.read(Stream::Compute, copy_.data(), from, n * static_cast<std::int64_t>(sizeof(T)));
    values_ = copy_;
  }
  HostView(HostView&&) noexcept = default;  // the copy's elements stay where they are
  HostView& operator=(HostView&&) noexcept = default;
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }
  const T* data() const { return values_.data(); }
  std::size_t size() const { return values_.size(); }

 private:
  std::vector<T> copy_;
  std::span<const T> values_;
};
template <class T = float>
HostView<T> host_view(Device& device, const Tensor& tensor) {
  return HostView<T>(device, tensor.data<T>(), tensor.numel());
}

// make(T* values) sets n elements, which are then the device's; nothing in a meta run.
template <class T, class Make>
void write_from_host(Device& device, T* to, std::int64_t n, Make make) {
  if (device.meta() || n == 0) return;
  if (device.kind() == DeviceKind::Cpu) {
    make(to);
    return;
  }
  std::vector<T> values(static_cast<std::size_t>(n));
  make(values.data());
  device.write(Stream::Compute, to, values.data(), n * static_cast<std::int64_t>(sizeof(T)));
}

}  // namespace regather
