// Copies on a thread of their own, first in first out: what a CPU has in place of a GPU's copy stream. Invariant: a
// copy that was recorded is done (or has failed) when its event has happened; after a failure nothing is copied any
// more, and every later event throws what went wrong. It allocates and frees nothing: whoever asks keeps both ends
// alive.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "tensor/device.h"

namespace regather {

class CopyThread {
 public:
  using Before = std::function<void(std::int64_t bytes)>;  // on the thread, before each copy; may throw
  explicit CopyThread(Before before);
  ~CopyThread();  // after all that was enqueued
  CopyThread(const CopyThread&) = delete;
  CopyThread& operator=(const CopyThread&) = delete;

  void copy(void* to, const void* from, std::int64_t bytes);
  void wait(const Event& event);  // what is enqueued later runs after it; of another copy thread
  Event record();
  CopyCounts counts() const;

 private:
  struct Shared;  // outlives the thread, for events that do
  class Recorded;
  void enqueue(std::function<void()> task);
  void work();

  Before before_;
  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

}  // namespace regather
