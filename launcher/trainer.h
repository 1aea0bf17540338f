// A model in training on this rank: step() does everything between a batch and changed parameters, the same on every
// rank (accumulation, reduction, clipping, optimizer, the audit of what was communicated). It knows no file and no
// command line. Invariant: after an exception the model is as it was before the step, or every rank fails.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ckpt/stack_runner.h"
#include "dist/optimizer.h"
#include "launcher/data.h"
#include "launcher/schedule.h"
#include "tensor/trace.h"

namespace regather {

struct TrainerOptions {
  CheckpointPlan checkpoint;
  StepPlanOptions plan;
  Strategy strategy = Strategy::Full;
  int prefetch = 1;
  OptimizerOptions optimizer;
  LearningRate learning_rate;
  double clip_grad_norm = 1.0;  // 0: not clipped
  enum class Nonfinite { Error, Skip } nonfinite = Nonfinite::Error;
  enum class Audit { Error, Warn } audit = Audit::Error;
  std::uint64_t seed = 1;
  DType compute = DType::F32;  // see StackOptions
  // Is this rank asked to stop? Read once in every step and evaluation, on every rank. Empty: never.
  std::function<bool()> stop_asked{};
  std::int64_t audit_recompute = 0;  // see StackOptions::audit_every
};

struct StepReport {
  std::int64_t step = 0;  // from 1
  double loss = 0, grad_norm = 0, lr = 0;
  std::int64_t tokens = 0;      // counted, of all ranks
  bool skipped = false;         // nothing was updated: numbers that are not finite, or no token to learn from
  bool looked_at_each = false;  // whether each parameter has a gradient was compared over the ranks
  double seconds = 0;
  double forward_flops = 0, recomputed_flops = 0;
  double hidden_seconds = 0;       // of reruns in the shadow of a gather
  Ledger::Entries collectives;     // of this rank
  std::vector<std::string> audit;  // differences to the plan; empty: as expected
};

struct EvaluationReport {
  double loss = 0;                 // mean over all counted tokens of all ranks
  std::vector<std::string> audit;  // differences to the plan; empty: as expected
};

class Trainer {
 public:
  // The model, device and communicator outlive the trainer.
  Trainer(const Model& model, Device& device, Communicator& comm, const TrainerOptions& options);

  // batches: this rank's micro-batches of the step. Collective. Throws if the step can't be trusted (see
  // TrainerOptions).
  StepReport step(std::span<const Batch> batches);
  // The loss of all ranks' batches, made one at a time. Changes nothing. Collective: as many batches on every rank.
  EvaluationReport evaluate(std::int64_t batches, const std::function<Batch(std::int64_t)>& batch);
  EvaluationReport evaluate(std::span<const Batch> batches) {
    return evaluate(static_cast<std::int64_t>(batches.size()),
                    [&](std::int64_t i) { return batches[static_cast<std::size_t>(i)]; });
  }

  std::int64_t steps_done() const { return steps_done_; }
  // Was any rank asked to stop, as of the last step or evaluation? The same on all ranks. A step without a token to
  // learn from does not find out.
  bool stop_asked() const { return stop_asked_; }
  // The communication that the plan says a step like this one has, on this rank.
  Ledger::Entries expected(const StepReport& report) const;
  // The differences between that and what was communicated since the ledger was reset; an error, if they are to be one.
  std::vector<std::string> audit(const Ledger::Entries& expected, std::string_view what) const;
  StackRunner& stack() { return *stack_; }
  Trace& trace() { return trace_; }
  std::int64_t parameters() const { return parameters_; }

 private:
  struct Sums {
    double loss = 0, squares = 0;
  };
  Tensor loss_weights(const Shape& shape, double total_tokens);
  Sums forward_backward(std::span<const Batch> batches, double total_tokens);
  void check_every_parameter_learns(StepReport& report);
  double asked_to_stop() const { return options_.stop_asked && options_.stop_asked() ? 1 : 0; }

  Device& device_;
  Communicator& comm_;
  TrainerOptions options_;
  Trace trace_;
  std::unique_ptr<StackRunner> stack_;
  std::unique_ptr<ShardedOptimizer> optimizer_;
  std::vector<double> learned_;  // by trainable parameter: ranks that saw a gradient in the first steps
  std::int64_t parameters_ = 0, trainable_tensors_ = 0, steps_done_ = 0, updates_ = 0;
  bool stop_asked_ = false;
};

}  // namespace regather
