#include "tensor/offload.h"

#include <chrono>

#include "tensor/recorder.h"

namespace regather {

Offloader::Room Offloader::take_room(std::int64_t bytes) {
  const auto found = rooms_.find(bytes);
  if (found == rooms_.end()) return {Buffer(device_.memory, bytes, Tag::Host), {}};
  Room room = std::move(found->second);
  rooms_.erase(found);
  return room;
}

void Offloader::give_back(Room room) {
  const std::int64_t bytes = room.memory.bytes();
  rooms_.emplace(bytes, std::move(room));
}

void Offloader::wait(const Event& copy) {
  const Timed timed(device_.recorder,
                    [] { return Recorder::Interval{.activity = Recorder::Activity::Copy, .name = "offload"}; });
  const auto begin = std::chrono::steady_clock::now();
  with_context([] { return "offload of activations"; }, [&] { device_.wait(Stream::Compute, copy); });
  stalled_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Offloaded::Offloaded(Offloader& offloader, Tensor value)
    : offloader_(&offloader), room_(offloader.take_room(value.bytes())), shape_(value.shape()), dtype_(value.dtype()) {
  Device& device = offloader.device_;
  value_ = std::move(value);
  state_ = State::Leaving;
  // What writes the value was enqueued before; and compute waited for the last copy of who had this room before.
  device.wait(Stream::ToHost, device.record(Stream::Compute));
  device.copy(Stream::ToHost, room_.memory.data(), value_.data<void>(), value_.bytes());
  stored_ = device.record(Stream::ToHost);
  room_.free = stored_;
  offloader.moved_bytes_ += value_.bytes();
}

Offloaded::Offloaded(Offloaded&& other) noexcept { *this = std::move(other); }

Offloaded& Offloaded::operator=(Offloaded&& other) noexcept {
  if (this == &other) return *this;
  release();
  state_ = std::exchange(other.state_, State::None);
  offloader_ = other.offloader_;
  room_ = std::move(other.room_);
  value_ = std::move(other.value_);
  shape_ = other.shape_;
  dtype_ = other.dtype_;
  stored_ = std::move(other.stored_);
  fetched_ = std::move(other.fetched_);
  return *this;
}

Offloaded::~Offloaded() { release(); }

void Offloaded::leave() {
  if (state_ != State::Leaving) return;
  offloader_->wait(stored_);
  value_.reset();
  state_ = State::Away;
}

void Offloaded::fetch() {
  if (state_ == State::Leaving) state_ = State::Coming;
  if (state_ != State::Away) return;
  Device& device = offloader_->device_;
  value_ = Tensor(device.memory, shape_, Tag::Activations, dtype_);
  state_ = State::Coming;
  // This memory may still be read by what was enqueued; and compute waited for the copy that it left with.
  device.wait(Stream::ToDevice, device.record(Stream::Compute));
  device.copy(Stream::ToDevice, value_.fresh<void>(), room_.memory.data(), value_.bytes());
  fetched_ = device.record(Stream::ToDevice);
  room_.free = fetched_;
}

Tensor Offloaded::take() {
  fetch();
  offloader_->wait(room_.free);  // also of one that never left: the copy still reads it
  offloader_->give_back(std::move(room_));
  state_ = State::None;
  return std::move(value_);
}

void Offloaded::release() noexcept {
  if (state_ == State::None) return;
  for (const Event& copy : {stored_, fetched_}) {
    try {  // a copy that failed has been reported, or will be by the next one: here only its memory matters
      offloader_->device_.wait(Stream::Compute, copy);
    } catch (...) {
    }
  }
  offloader_->give_back(std::move(room_));
  value_.reset();
  state_ = State::None;
}

}  // namespace regather
