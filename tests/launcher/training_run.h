// Trains a small model for a few steps on simulated or real ranks and returns everything that a test may compare:
// losses, whole gradients by parameter, the ledger, exact bytes, what ran. Batches are a function of the step and the
// sequence's index in it, so that any number of ranks trains on the same global batch.
#pragma once
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "launcher/trainer.h"
#include "model/registry.h"
#include "tensor/host_view.h"

namespace regather::testing {

struct RunSetup {
  ModelConfig model{
      .type = "gpt2", .layers = 4, .hidden = 32, .heads = 2, .vocab = 257, .max_sequence = 16, .init_std = 0.2F};
  PolicyOptions policy{.policy = "none"};
  StepPlanOptions plan;
  Strategy strategy = Strategy::Full;
  OptimizerOptions optimizer;
  int world = 2, steps = 2;
  std::int64_t micro_batch = 2, sequence = 16;
  std::optional<int> prefetch;
  double lr = 1e-2, clip = 1.0;
  std::uint64_t seed = 1;
  DType compute = DType::F32;
  Allocator::Mode mode = Allocator::Mode::Real;
  TrainerOptions::Nonfinite nonfinite = TrainerOptions::Nonfinite::Error;
  // Is token t of this sequence of the step counted in the loss? Empty: all are.
  std::function<bool(std::uint64_t sequence, std::int64_t t)> counted{};
  bool same_batch = false;  // every step trains on the batch of step 0
  // Makes the model of a rank; empty: make_model(model).
  std::function<Model(const RunSetup&, int rank)> make{};
  std::vector<int> evaluate_before;           // steps (from 0) before which an evaluation runs
  std::chrono::microseconds delay{0};         // of each collective
  int retries = 0;                            // of steps that fail, alike on every rank
  std::int64_t audit = 0;                     // see StackOptions::audit_every
  std::function<void(CpuDevice&)> prepare{};  // slows the copies of a rank's device down, or breaks one
};

// The same of a built-in type; Llama with fewer key and value heads and a table of its own for the head.
inline RunSetup setup_of(const std::string& type) {
  RunSetup s;
  s.model.type = type;
  if (type == "llama") {
    s.model.heads = 4;
    s.model.kv_heads = 2;
    s.model.tie_embeddings = false;
  }
  return s;
}

struct RunResult {
  std::vector<double> losses, norms, evaluations;
  std::vector<bool> skipped;
  std::map<std::string, std::vector<float>> gradients, parameters;  // of the last step; after it
  std::vector<Ledger::Entries> collectives;                         // by step, of rank 0
  std::vector<std::vector<Allocator::Event>> events;                // by step, of rank 0
  BytesByTag peak{}, at_peak{}, before{};  // of the last step, rank 0; before: live when it began
  std::int64_t peak_total = 0;
  double forward_flops = 0, recomputed_flops = 0;        // of the last step, rank 0
  std::map<std::string, int, std::less<>> runs, reruns;  // of the last step, rank 0
};

inline std::int32_t token_at(std::uint64_t step, std::uint64_t sequence, std::uint64_t t, std::int64_t vocab) {
  return static_cast<std::int32_t>(mix(mix(mix(7, step), sequence), t) % static_cast<std::uint64_t>(vocab));
}

inline Batch make_batch(Device& device, const RunSetup& s, int rank, int world, int step, int m) {
  const BatchGrid grid{world, s.micro_batch, s.plan.micro_batches};
  Batch batch;
  batch.first_sequence = grid.first_sequence(rank, m);
  const auto make = [&](const auto& token) {  // (sequence, t)
    Tensor tokens(device.memory, {s.micro_batch, s.sequence}, Tag::Workspace, DType::I32);
    write_from_host(device, tokens.fresh<std::int32_t>(), tokens.numel(), [&](std::int32_t* to) {
      for (std::int64_t b = 0; b < s.micro_batch; ++b)
        for (std::int64_t t = 0; t < s.sequence; ++t)
          *to++ = token(static_cast<std::uint64_t>(batch.first_sequence + b), t);
    });
    return tokens;
  };
  const auto at = [&](std::uint64_t sequence, std::int64_t t) {
    return token_at(static_cast<std::uint64_t>(step), sequence, static_cast<std::uint64_t>(t), s.model.vocab);
  };
  batch.tokens = make(at);
  batch.targets = make([&](std::uint64_t sequence, std::int64_t t) {
    return !s.counted || s.counted(sequence, t) ? at(sequence, t + 1) : -1;
  });
  if (!s.counted) batch.counted = batch.targets.numel();
  return batch;
}

inline TrainerOptions trainer_options(const RunSetup& s) {
  TrainerOptions o;
  PolicyOptions policy = s.policy;
  if (policy.policy == "selective" || !policy.offload.names.empty()) {
    const Model model = s.make ? s.make(s, 0) : make_model(s.model);
    policy.marks = marks_of(model);
    policy.costly = costly_marks_of(model);
  }
  o.checkpoint = make_checkpoint_plan(policy, static_cast<int>(s.model.layers));
  o.plan = s.plan;
  o.strategy = s.strategy;
  o.prefetch = s.prefetch.value_or(std::min(1, s.plan.slots - 1));
  o.optimizer = s.optimizer;
  o.learning_rate = {.shape = LearningRate::Shape::Constant, .peak = s.lr};
  o.clip_grad_norm = s.clip;
  o.seed = s.seed;
  o.compute = s.compute;
  o.nonfinite = s.nonfinite;
  o.audit_recompute = s.audit;
  return o;
}

// Copies the elements that this rank owns to where they belong in the whole tensors.
inline void collect(Trainer& trainer, RunResult& result, std::mutex& mutex) {
  const std::lock_guard lock(mutex);
  for (auto& unit : trainer.stack().units())
    for (const ShardUnit::OwnedPiece& piece : unit->normed()) {
      const ParamInfo& info = unit->table()[static_cast<std::size_t>(piece.param)];
      for (auto [whole, part] :
           {std::pair{&result.gradients[info.name], piece.gradient}, {&result.parameters[info.name], piece.value}}) {
        whole->resize(static_cast<std::size_t>(info.shape.numel()));
        std::memcpy(whole->data() + piece.first, part, static_cast<std::size_t>(piece.size) * sizeof(float));
      }
    }
}

inline StepReport step_with_retries(Trainer& trainer, const std::vector<Batch>& batches, int retries) {
  for (;; --retries) try {
      return trainer.step(batches);
    } catch (const PeerFailed&) {
      throw;
    } catch (const Error&) {
      if (retries == 0) throw;
    }
}

// One rank's part of a run. result is filled by rank 0, gradients and parameters by all.
inline void run_rank(const RunSetup& s, const Model& model, Communicator& comm, RunResult& result, std::mutex& mutex) {
  std::vector<Allocator::Event> events;  // outlives the device, whose log it is
  CpuDevice device(s.mode);
  if (s.prepare) s.prepare(device);
  Trainer trainer(model, device, comm, trainer_options(s));
  const bool first = comm.rank() == 0;
  for (int step = 0; step < s.steps; ++step) {
    std::vector<Batch> batches;
    for (int m = 0; m < s.plan.micro_batches; ++m)
      batches.push_back(make_batch(device, s, comm.rank(), comm.size(), s.same_batch ? 0 : step, m));
    if (std::ranges::find(s.evaluate_before, step) != s.evaluate_before.end()) {
      const double loss = trainer.evaluate(std::span(batches).first(1)).loss;
      if (first) result.evaluations.push_back(loss);
    }
    device.memory.restart_peaks();
    events.clear();
    device.memory.log = &events;
    if (first) result.before = device.memory.live_by_tag();
    trainer.trace().runs.clear();
    trainer.trace().reruns.clear();
    const StepReport report = step_with_retries(trainer, batches, s.retries);
    device.memory.log = nullptr;
    if (!first) continue;
    result.losses.push_back(report.loss);
    result.norms.push_back(report.grad_norm);
    result.skipped.push_back(report.skipped);
    result.collectives.push_back(report.collectives);
    result.events.push_back(events);
    result.peak = device.memory.peak_by_tag();
    result.at_peak = device.memory.at_peak();
    result.peak_total = device.memory.peak_total();
    result.forward_flops = report.forward_flops;
    result.recomputed_flops = report.recomputed_flops;
    result.runs = trainer.trace().runs;
    result.reruns = trainer.trace().reruns;
  }
  if (!device.meta()) collect(trainer, result, mutex);
}

inline RunResult train(const RunSetup& s) {
  RunResult result;
  std::mutex mutex;
  const Model model = make_model(s.model);
  SimOptions options;
  options.checked = true;
  options.delay = s.delay;
  run_ranks(s.world, options, [&](Communicator& comm) {
    if (s.make) return run_rank(s, s.make(s, comm.rank()), comm, result, mutex);
    run_rank(s, model, comm, result, mutex);
  });
  return result;
}

// What the run fails with; empty: it does not.
inline std::string failure_of(const RunSetup& s) {
  try {
    train(s);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

// How often and how many bytes a collective of a unit crossed the wire, over all passes (or one).
inline LedgerCounts total(const Ledger::Entries& entries, Collective collective, std::string_view unit,
                          std::optional<Pass> pass = {}) {
  LedgerCounts sum;
  for (const auto& [key, counts] : entries)
    if (key.collective == collective && key.unit == unit && (!pass || key.pass == *pass)) {
      sum.count += counts.count;
      sum.wire_bytes += counts.wire_bytes;
      sum.logical_bytes += counts.logical_bytes;
    }
  return sum;
}

}  // namespace regather::testing
