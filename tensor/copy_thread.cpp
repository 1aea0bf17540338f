#include "tensor/copy_thread.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>

#include "tensor/error.h"

namespace regather {

struct CopyThread::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  std::int64_t enqueued = 0, done = 0;  // tasks
  bool stopping = false;
  std::optional<Error> failure;  // the first
  CopyCounts counts;
};

class CopyThread::Recorded final : public Event::State {
 public:
  Recorded(std::shared_ptr<Shared> shared, std::int64_t task) : shared_(std::move(shared)), task_(task) {}
  bool done() override {
    const std::lock_guard lock(shared_->mutex);
    return shared_->done >= task_;
  }
  void wait() override {
    std::unique_lock lock(shared_->mutex);
    shared_->changed.wait(lock, [&] { return shared_->done >= task_; });
    if (shared_->failure) throw Error(*shared_->failure);
  }

 private:
  std::shared_ptr<Shared> shared_;
  std::int64_t task_;
};

CopyThread::CopyThread(Before before)
    : before_(std::move(before)), shared_(std::make_shared<Shared>()), thread_([this] { work(); }) {}

CopyThread::~CopyThread() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stopping = true;
  }
  shared_->changed.notify_all();
  thread_.join();
}

void CopyThread::enqueue(std::function<void()> task) {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->tasks.push_back(std::move(task));
    ++shared_->enqueued;
  }
  shared_->changed.notify_all();
}

void CopyThread::copy(void* to, const void* from, std::int64_t bytes) {
  enqueue([this, to, from, bytes] {
    const auto begin = std::chrono::steady_clock::now();
    if (before_) before_(bytes);
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const std::lock_guard lock(shared_->mutex);
    shared_->counts.bytes += bytes;
    shared_->counts.seconds += seconds;
  });
}

void CopyThread::wait(const Event& event) {
  if (event.state() != nullptr) enqueue([event] { event.wait(); });
}

Event CopyThread::record() {
  const std::lock_guard lock(shared_->mutex);
  return Event(std::make_shared<Recorded>(shared_, shared_->enqueued));
}

CopyCounts CopyThread::counts() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->counts;
}

void CopyThread::work() {
  std::unique_lock lock(shared_->mutex);
  for (;;) {
    shared_->changed.wait(lock, [&] { return shared_->stopping || !shared_->tasks.empty(); });
    if (shared_->tasks.empty()) return;
    auto task = std::move(shared_->tasks.front());
    shared_->tasks.pop_front();
    std::optional<Error> failure;
    if (!shared_->failure) {
      lock.unlock();
      try {
        task();
      } catch (const Error& e) {
        failure = e;
      } catch (const std::exception& e) {
        failure = Error(e.what());
      }
      task = nullptr;
      lock.lock();
    }
    if (failure) shared_->failure = std::move(failure);
    ++shared_->done;
    shared_->changed.notify_all();
  }
}

}  // namespace regather
