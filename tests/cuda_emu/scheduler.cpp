// Which piece of work runs next, and which host. Four ways to choose, by the seed: uniformly; by priorities, so that
// one stream starves another; by priorities that change; and with a device that keeps up with the host.
#include <fmt/format.h>

#include <algorithm>
#include <cassert>

#include "tests/cuda_emu/fibers.h"
#include "tests/cuda_emu/meetings.h"
#include "tests/cuda_emu/sanitizers.h"
#include "tests/cuda_emu/state.h"

namespace cuda_emu {
namespace {

// The C functions have no handle that could lead to a machine.
State* living = nullptr;
thread_local Host* this_host = nullptr;

enum Way : std::uint64_t { kUniform, kPriorities, kChangingPriorities, kKeepsUp, kWays };

}  // namespace

State& state() {
  assert(living && "CUDA is used while no Machine lives");
  return *living;
}

State::State(const Options& chosen)
    : options(chosen),
      random(chosen.seed),
      fibers(std::make_unique<FiberPool>()),
      meetings(std::make_unique<Meetings>()) {
  assert(!living && "one Machine at a time");
  for (int d = 0; d < options.devices; ++d)
    devices.push_back(std::make_unique<DeviceMemory>(options.capacity, options.guarded));
  living = this;
}
State::~State() {
  for (const auto& stream : all_streams) {
    acquire(stream.get());
    if (stream->fiber) delete_fiber(stream->fiber);
  }
  for (const auto& [data, bytes] : pinned) ::operator delete(const_cast<char*>(data));
  living = nullptr;
}

Host& State::host() { return this_host ? *this_host : main_; }

// ---- streams --------------------------------------------------------------------------------------------------------

void State::enqueue(cudaStream_t stream, std::string name, std::function<void()> run, std::function<bool()> ready) {
  if (!stream || std::find(streams.begin(), streams.end(), stream) == streams.end() || stream->destroyed) {
    report(fmt::format("{} on {}", name, stream ? "a stream that does not exist" : "the legacy default stream"));
    return;
  }
  if (stream->context->failed) return;
  Task task{++sequence, std::move(name), std::move(run), std::move(ready), std::make_shared<char>()};
  release(task.enqueued.get());
  vain_polls = 0;
  stream->last = task.sequence;
  stream->tasks.push_back(std::move(task));
  const std::uint64_t way = options.seed % kWays;
  if (way == kKeepsUp || (way != kPriorities && draw(4) == 0)) step();
}

// What is in its streams never runs, so there is nothing to wait for.
void State::fail(Context& context) {
  context.failed = true;
  for (CUstream_st* stream : streams) {
    if (stream->context.get() != &context) continue;
    stream->tasks.clear();
    stream->last = stream->done;
  }
}

CUstream_st* State::pick() {
  std::vector<CUstream_st*> ready;
  for (CUstream_st* s : streams)
    if (!s->tasks.empty() && (!s->tasks.front().ready || s->tasks.front().ready())) ready.push_back(s);
  if (ready.empty()) return nullptr;
  const std::uint64_t way = options.seed % kWays;
  if (way == kChangingPriorities && draw(8) == 0)
    for (CUstream_st* s : streams) s->priority = random();
  if (way == kPriorities || way == kChangingPriorities)
    return *std::max_element(ready.begin(), ready.end(),
                             [](const auto* a, const auto* b) { return a->priority < b->priority; });
  return ready[draw(ready.size())];
}

void State::run_task(CUstream_st& stream) {
  Task task = std::move(stream.tasks.front());
  stream.tasks.pop_front();
  void* const here = this_fiber();
  switch_fiber(stream.fiber);
  {
    const Unseen unseen;
    acquire(task.enqueued.get());
    for (const auto& device : devices) device->open();
    if (task.run) task.run();
    for (const auto& device : devices) device->close();
    stream.done = task.sequence;
    task = {};  // what it holds ends in the stream's own context
    release(&stream);
  }
  switch_fiber(here);
  if (stream.destroyed && stream.tasks.empty()) retire(stream);
}

void State::destroy(CUstream_st& stream) {
  stream.destroyed = true;
  if (stream.tasks.empty()) retire(stream);
}

// Whoever waits for its last task may still look at it.
void State::retire(CUstream_st& stream) {
  std::erase(streams, &stream);
  if (stream.fiber) delete_fiber(stream.fiber);
  stream.fiber = nullptr;
}

bool State::step() {
  CUstream_st* stream = pick();
  if (stream) {
    vain_polls = 0;
    run_task(*stream);
  }
  return stream != nullptr;
}

// ---- hosts ----------------------------------------------------------------------------------------------------------

std::vector<Host*> State::runnable_hosts() {
  std::vector<Host*> others;
  for (const auto& h : hosts_)
    if (h.get() != this_host && !h->finished && (!h->ready || h->ready())) others.push_back(h.get());
  return others;
}

void State::hand_over(Host& to) {
  Host& me = host();
  std::unique_lock lock(mutex_);
  running_ = &to;
  to.turn.notify_one();
  if (!me.finished) me.turn.wait(lock, [&] { return running_ == &me; });
}

bool State::wait_until(const std::function<bool()>& happened, const std::string& who) {
  Host& me = host();
  const auto ready = [&] { return me.context->failed || happened(); };
  while (!ready()) {
    if (dead) return false;
    me.ready = ready;
    me.waits_in = who;
    const std::vector<Host*> others = this_host ? runnable_hosts() : std::vector<Host*>{};
    if ((others.empty() || draw(2) == 0) && step()) continue;
    if (!others.empty())
      hand_over(*others[draw(others.size())]);
    else if (!step())
      give_up(who);
  }
  me.ready = nullptr;
  return true;
}

void State::let_others_go_on() {
  step();
  const std::vector<Host*> others = this_host ? runnable_hosts() : std::vector<Host*>{};
  if (!others.empty()) hand_over(*others[draw(others.size())]);
}

bool State::poll(const std::string& who) {
  if (!dead && ++vain_polls > options.most_vain_polls) {
    host().waits_in = who;
    give_up(who);
  }
  if (dead) return false;
  let_others_go_on();
  return true;
}

// Nothing can run any more: says who waits for what, and ends all waiting.
void State::give_up(const std::string& who) {
  dead = true;
  std::string text = "deadlock:";
  if (hosts_.empty()) text += fmt::format(" the host waits in {};", who);
  for (const auto& h : hosts_)
    text += h->finished ? fmt::format(" rank {} has ended;", h->rank)
                        : fmt::format(" rank {} waits in {};", h->rank, h->waits_in);
  for (CUstream_st* s : streams) {
    if (s->tasks.empty()) continue;
    text += fmt::format(" device {} stream {} is at {} of {} tasks;", s->device, s->number, s->tasks.front().name,
                        s->tasks.size());
    s->tasks.clear();
  }
  text.pop_back();
  report(std::move(text));
  for (const auto& h : hosts_) h->ready = nullptr;
}

void State::join(int rank, int ranks) {
  std::unique_lock lock(mutex_);
  if (std::all_of(hosts_.begin(), hosts_.end(), [](const auto& h) { return h->finished; })) hosts_.clear();
  Host& me = *hosts_.emplace_back(std::make_unique<Host>());
  me.rank = me.device = rank;
  this_host = &me;
  if (static_cast<int>(hosts_.size()) == ranks) {
    std::sort(hosts_.begin(), hosts_.end(), [](const auto& a, const auto& b) { return a->rank < b->rank; });
    running_ = hosts_[draw(hosts_.size())].get();
    for (const auto& h : hosts_) h->turn.notify_one();
  }
  me.turn.wait(lock, [&] { return running_ == &me; });
}

void State::leave() {
  host().finished = true;
  std::vector<Host*> others = runnable_hosts();
  for (const auto& h : hosts_)  // none: all wait, and one of them will find out whether that is for ever
    if (others.empty() && !h->finished) others.push_back(h.get());
  if (!others.empty()) hand_over(*others[draw(others.size())]);
  this_host = nullptr;
}

}  // namespace cuda_emu
