// Values that wait in host memory between forward and backward. Copies run on the device's own streams (ToHost,
// ToDevice), beside the computation. Invariant: device memory is taken and given back when the caller says so, at
// points fixed by the program (never "when the copy happens to end"), so peaks stay exactly predictable; host memory is
// taken in the first step and used again, so later steps allocate none. It does not decide what is moved or when.
#pragma once
#include <map>

#include "tensor/device.h"
#include "tensor/tensor.h"

namespace regather {

class Offloader {
 public:
  explicit Offloader(Device& device) : device_(device) {}
  Offloader(const Offloader&) = delete;
  Offloader& operator=(const Offloader&) = delete;

  // Seconds that the computation waited for copies; on a GPU, where the host does not wait, 0.
  double stalled_seconds() const { return stalled_seconds_; }
  std::int64_t moved_bytes() const { return moved_bytes_; }  // to the host

 private:
  friend class Offloaded;
  struct Room {  // host memory
    Buffer memory;
    Event free;  // the last copy that reads or writes it
  };
  Room take_room(std::int64_t bytes);
  void give_back(Room room);
  void wait(const Event& copy);

  Device& device_;
  std::multimap<std::int64_t, Room> rooms_;  // not in use, by size; of one size the longest unused first
  double stalled_seconds_ = 0;
  std::int64_t moved_bytes_ = 0;
};

// One value: on its way to the host, there, or on its way back. Move-only.
class Offloaded {
 public:
  Offloaded() = default;
  Offloaded(Offloader& offloader, Tensor value);  // the copy starts; the device memory is still held
  Offloaded(Offloaded&& other) noexcept;
  Offloaded& operator=(Offloaded&& other) noexcept;
  ~Offloaded();  // after the copies that use its memory

  explicit operator bool() const { return state_ != State::None; }
  void leave();   // the copy ends; the device memory is given back
  void fetch();   // starts to bring it back; one that has not left needs no copy
  Tensor take();  // the value; waits for it, and starts to bring it back if nobody did

 private:
  enum class State { None, Leaving, Away, Coming };
  void release() noexcept;

  State state_ = State::None;
  Offloader* offloader_ = nullptr;
  Offloader::Room room_;
  Tensor value_;  // not while it is away
  Shape shape_;
  DType dtype_ = DType::F32;
  Event stored_, fetched_;
};

}  // namespace regather
