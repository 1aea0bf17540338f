// How long a training step takes: a small GPT-2 under a checkpoint policy, on simulated ranks or on this rank of any
// communicator. The first step, in which memory is taken, is not counted.
#pragma once
#include <omp.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "launcher/trainer.h"
#include "model/registry.h"

namespace regather::bench {

constexpr int kRounds = 4;

// What is measured. Sequences are as long as the model can be given.
struct StepTime {
  ModelConfig model{};
  PolicyOptions policy{};
  int micro_batch = 2, slots = 2, prefetch = 1;
  int steps = 3;  // timed, of a round
  std::function<std::unique_ptr<Device>()> device = [] { return std::make_unique<CpuDevice>(); };
};

// Of all timed steps.
struct Measured {
  std::vector<double> seconds, hidden, stalled;  // hidden: reruns in the shadow of a gather; stalled: waits for copies
  CopyCounts to_host, to_device;

  void add(const Measured& more) {
    seconds.insert(seconds.end(), more.seconds.begin(), more.seconds.end());
    hidden.insert(hidden.end(), more.hidden.begin(), more.hidden.end());
    stalled.insert(stalled.end(), more.stalled.begin(), more.stalled.end());
    to_host = {to_host.bytes + more.to_host.bytes, to_host.seconds + more.to_host.seconds};
    to_device = {to_device.bytes + more.to_device.bytes, to_device.seconds + more.to_device.seconds};
  }
};

inline double median(std::vector<double> v) {
  std::ranges::nth_element(v, v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2));
  return v[v.size() / 2];
}

// Half the distance between the quartiles, by the median.
inline double spread(std::vector<double> v) {
  std::ranges::sort(v);
  return (v[3 * v.size() / 4] - v[v.size() / 4]) / 2 / median(v);
}

// On this rank; collective.
inline Measured measure(const StepTime& of, Communicator& comm) {
  omp_set_num_threads(std::max(1, omp_get_num_procs() / comm.size()));  // ranks share the processors
  const std::unique_ptr<Device> device = of.device();
  const Model model = make_model(of.model);
  TrainerOptions options;
  PolicyOptions with_marks = of.policy;
  with_marks.marks = marks_of(model);
  with_marks.costly = costly_marks_of(model);
  options.checkpoint = make_checkpoint_plan(with_marks, static_cast<int>(of.model.layers));
  options.plan.slots = of.slots;
  options.prefetch = of.prefetch;
  Trainer trainer(model, *device, comm, options);
  device->between_ops = [&comm] { comm.progress(); };
  Batch batch;
  batch.tokens = Tensor(device->memory, {of.micro_batch, of.model.max_sequence}, Tag::Workspace, DType::I32);
  for (std::int64_t i = 0; i < batch.tokens.numel(); ++i)
    batch.tokens.fresh<std::int32_t>()[i] = static_cast<std::int32_t>(i * 7 % of.model.vocab);
  batch.targets = batch.tokens;
  Measured measured;
  double stalled_before = 0;
  for (int step = 0; step <= of.steps; ++step) {
    const StepReport report = trainer.step({&batch, 1});
    const double stalled_now = trainer.stack().offloader().stalled_seconds();
    if (step > 0) {
      measured.seconds.push_back(report.seconds);
      measured.hidden.push_back(report.hidden_seconds);
      measured.stalled.push_back(stalled_now - stalled_before);
    }
    stalled_before = stalled_now;
  }
  measured.to_host = device->copies(Stream::ToHost);
  measured.to_device = device->copies(Stream::ToDevice);
  return measured;
}

// Each of them in turn, as often as there are rounds, so that what else the machine does meets all alike; another one
// begins each round. Collective.
inline std::vector<Measured> measure_in_turn(const std::vector<StepTime>& all, Communicator& comm) {
  std::vector<Measured> measured(all.size());
  for (int round = 0; round < kRounds; ++round)
    for (std::size_t k = 0; k < all.size(); ++k) {
      const std::size_t i = (k + static_cast<std::size_t>(round)) % all.size();
      measured[i].add(measure(all[i], comm));
    }
  return measured;
}

// On simulated ranks; what rank 0 saw.
inline std::vector<Measured> measure_in_turn(const std::vector<StepTime>& all, int ranks, const SimOptions& options) {
  std::vector<Measured> measured;
  run_ranks(ranks, options, [&](Communicator& comm) {
    std::vector<Measured> here = measure_in_turn(all, comm);
    if (comm.rank() == 0) measured = std::move(here);
  });
  return measured;
}

}  // namespace regather::bench
