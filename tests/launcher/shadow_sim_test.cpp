// What needs no gathered parameter runs while the gather is in flight.
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <thread>

#include "tests/launcher/faulty_block.h"
#include "tests/launcher/training_run.h"
#include "tests/launcher/two_streams.h"

namespace regather::testing {
namespace {

class Latch {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  bool wait() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [&] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

RunSetup one_slot(const PolicyOptions& policy) {
  RunSetup s;
  s.policy = policy;
  s.plan.slots = 1;
  s.prefetch = 0;
  s.steps = 1;
  return s;
}

// Rank 1 comes to the gather of block 1 only after rank 0 has rerun an operation of block 1: if that waited for the
// gather, nobody would go on. watch(model, block, each): each() is called whenever that operation runs in that block.
template <class MakeModel, class Watch>
void expect_shadow(const RunSetup& s, MakeModel make, Watch watch) {
  Latch latch;
  bool reached = true;
  double hidden = 0;
  run_ranks(2, {}, [&](Communicator& comm) {
    CpuDevice device;
    Model model = make(s.model);
    const bool first = comm.rank() == 0;
    int executions = 0;  // the second one is the backward's
    watch(model, std::size_t{first ? 1U : 2U}, [&] {
      if (++executions != 2) return;
      if (first) {
        latch.open();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      } else {
        reached = latch.wait();
      }
    });
    Trainer trainer(model, device, comm, trainer_options(s));
    const Batch batch = make_batch(device, s, comm.rank(), 2, 0, 0);
    const StepReport report = trainer.step({&batch, 1});
    if (first) hidden = report.hidden_seconds;
  });
  EXPECT_TRUE(reached);
  EXPECT_GE(hidden, 1e-3);
}

TEST(Shadow, TheFirstRerunDoesNotWaitForTheGather) {
  expect_shadow(
      one_slot({.policy = "full"}), [](const ModelConfig& config) { return make_model(config); },
      [](Model& model, std::size_t block, const auto& each) {
        put_fault(model, block, [each](std::uint64_t, float*, std::int64_t) { each(); });
      });
}

// The same after the norm that the block begins with: its gain and bias stayed when the block was evicted. Lazily, what
// is rerun first is what reads the input; ahead, everything up to the first matrix.
TEST(Shadow, TheLeadingNormDoesNotWaitForTheGather) {
  for (const Order order : {Order::Lazy, Order::Ahead})
    expect_shadow(
        one_slot({.policy = "full", .order = order}),
        [](const ModelConfig& config) { return make_two_streams(config); },
        [](Model& model, std::size_t block, const auto& each) {
          model.blocks[block].block = std::make_unique<StreamsBlock>(0.0F, each);
        });
}

// A gather that takes long is not hidden by a rerun that waits for it.
TEST(Shadow, WaitingIsNotHidden) {
  const RunSetup s = one_slot({.policy = "full", .order = Order::Eager});
  SimOptions options;
  options.delay = std::chrono::milliseconds(20);
  run_ranks(2, options, [&](Communicator& comm) {
    CpuDevice device;
    const Model model = make_model(s.model);
    Trainer trainer(model, device, comm, trainer_options(s));
    const Batch batch = make_batch(device, s, comm.rank(), 2, 0, 0);
    EXPECT_LT(trainer.step({&batch, 1}).hidden_seconds, 20e-3);  // of three blocks that wait
  });
}

TEST(Shadow, NothingIsHiddenWhereNothingIsRerun) {
  const RunSetup s = one_slot({.policy = "selective", .keep = {{.keep = {"*"}}}});
  run_ranks(2, {}, [&](Communicator& comm) {
    CpuDevice device;
    const Model model = make_model(s.model);
    Trainer trainer(model, device, comm, trainer_options(s));
    const Batch batch = make_batch(device, s, comm.rank(), 2, 0, 0);
    EXPECT_EQ(trainer.step({&batch, 1}).hidden_seconds, 0);
  });
}

}  // namespace
}  // namespace regather::testing
