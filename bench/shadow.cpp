// What recomputing in the shadow of a gather is worth: two simulated ranks whose collectives take a while, one slot and
// no prefetch, so that every backward begins with a gather. The same values are rerun either way: `eager` reruns in the
// order of forward, so it waits for the first matrix; `ahead` begins with all that reads none. Under `full` that is the
// norm a block begins with; where q k v, the MLP's first product and the middle are kept, all that is rerun.
//   build/cpu/bench/bench_shadow
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <vector>

#include "launcher/trainer.h"
#include "model/registry.h"

namespace {

using namespace regather;

constexpr int kLayers = 6, kSteps = 9;
constexpr std::int64_t kSequence = 512;

ModelConfig model_config() {
  return {.type = "gpt2", .layers = kLayers, .hidden = 256, .heads = 4, .vocab = 256, .max_sequence = kSequence};
}

struct Measured {
  double seconds = 0, hidden = 0;
};

Measured measure(const PolicyOptions& policy, std::chrono::microseconds delay) {
  SimOptions sim;
  sim.delay = delay;
  std::mutex mutex;
  std::vector<double> seconds, hidden;
  run_ranks(2, sim, [&](Communicator& comm) {
    CpuDevice device;
    const Model model = make_model(model_config());
    TrainerOptions options;
    PolicyOptions with_marks = policy;
    with_marks.marks = marks_of(model);
    options.checkpoint = make_checkpoint_plan(with_marks, kLayers);
    options.plan.slots = 1;
    options.prefetch = 0;
    Trainer trainer(model, device, comm, options);
    device.between_ops = [&comm] { comm.progress(); };
    Batch batch;
    batch.tokens = Tensor(device.memory, {2, kSequence}, Tag::Workspace, DType::I32);
    for (std::int64_t i = 0; i < batch.tokens.numel(); ++i)
      batch.tokens.fresh<std::int32_t>()[i] = static_cast<std::int32_t>(i * 7 % 256);
    batch.targets = batch.tokens;
    for (int step = 0; step < kSteps; ++step) {
      const StepReport report = trainer.step({&batch, 1});
      const std::lock_guard lock(mutex);
      if (comm.rank() != 0 || step == 0) continue;
      seconds.push_back(report.seconds);
      hidden.push_back(report.hidden_seconds);
    }
  });
  const auto median = [](std::vector<double>& v) {
    std::ranges::nth_element(v, v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2));
    return v[v.size() / 2];
  };
  return {median(seconds), median(hidden)};
}

}  // namespace

int main() {
  const PolicyOptions full{.policy = "full"},
      selective{.policy = "selective", .keep = {{.keep = {"qkv", "mlp.up", "mid"}}}};
  fmt::print("{:>10} {:>10} {:>18} {:>18} {:>9} {:>14}\n", "policy", "delay, ms", "wait first, ms", "in the shadow, ms",
             "shorter", "hidden, ms");
  for (PolicyOptions policy : {full, selective})
    for (const int milliseconds : {0, 2, 5, 10, 20}) {
      const std::chrono::microseconds delay{1000 * milliseconds};
      policy.order = Order::Eager;
      const Measured first = measure(policy, delay);
      policy.order = Order::Ahead;
      const Measured shadow = measure(policy, delay);
      fmt::print("{:>10} {:>10} {:>18.1f} {:>18.1f} {:>8.1f}% {:>14.2f}\n", policy.policy, milliseconds,
                 1e3 * first.seconds, 1e3 * shadow.seconds, 100 * (1 - shadow.seconds / first.seconds),
                 1e3 * shadow.hidden);
    }
}
