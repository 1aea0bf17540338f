// Runs the forward and backward of one optimizer step over the whole model by interpreting a StepPlan. Gather counts
// are exact for every policy because they are data; prefetch takes the plan's next entry and never looks at the
// direction of a pass. It does not know batches on disk, losses over ranks, optimizers or the command line.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "ckpt/block_runner.h"
#include "ckpt/policy.h"
#include "ckpt/step_plan.h"

namespace regather {

struct StackOptions {
  CheckpointPlan checkpoint;
  StepPlanOptions plan;  // its segments and offload_depth are taken from `checkpoint`
  Strategy strategy = Strategy::Full;
  int prefetch = 1;  // how many plan entries ahead a gather may start, if its room is free
  std::uint64_t seed = 1;
  DType compute = DType::F32;  // elements of parameters and activations in use: F32 or BF16
  // Every so many steps one block, a different one each time, compares what it reruns (and what comes back from the
  // host) with what forward made; a difference ends the step. 0: never.
  std::int64_t audit_every = 0;
};

// Everything one rank feeds into one micro-batch.
struct MicroBatch {
  Tensor tokens, targets;      // [B, T] int32; a target of -1 is not counted
  Tensor loss_weight;          // [B, T]: the gradient of each token's loss
  std::uint64_t sequence = 0;  // index within the step of its first sequence, over all ranks
};

class StackRunner {
 public:
  StackRunner(const Model& model, Device& device, Communicator& comm, const StackOptions& options);

  // token_losses: [B, T], of micro-batch m, valid during the call.
  using OnLoss = std::function<void(int m, const Tensor& token_losses)>;
  // One forward and backward over all micro-batches; gradients are summed and reduced in the units.
  void step(std::span<const MicroBatch> batches, std::uint64_t step, const OnLoss& on_loss);
  Tensor evaluate(const Tensor& tokens, const Tensor& targets);  // token losses [B, T]; no tape, nothing is kept

  std::vector<std::unique_ptr<ShardUnit>>& units() { return units_; }
  const StepPlan& plan() const { return plan_; }
  const Offloader& offloader() const { return offloader_; }
  // When set: called before each entry of a step's plan, and with their number after the last. For measurements.
  std::function<void(std::size_t)> before_action;
  Ledger::Entries expected() const;  // the communication of step() and, where parameters are replicated, of the refresh
  Ledger::Entries expected_of_evaluation(std::int64_t batches) const;  // of so many calls of evaluate()

 private:
  using Flow = std::vector<Activations>;  // by micro-batch: what the next action receives, activations or gradients
  void make_runners();
  BlockRunner& runner(int part);
  std::vector<ShardUnit*> pointers(const std::vector<int>& units);
  std::vector<UnitVolume> volumes() const;
  void choose_audited(std::uint64_t step);
  void make_resident(const StepPlan::Entry& entry);
  void prefetch_after(std::size_t t);
  void run(std::size_t t, std::span<const MicroBatch> batches, std::uint64_t step, Flow& flow, const OnLoss& on_loss);
  void forget() noexcept;

  const Model& model_;
  Device& device_;
  Communicator& comm_;
  StackOptions options_;
  PartUnits part_units_;
  StepPlan plan_;
  std::vector<std::unique_ptr<ShardUnit>> units_;
  Offloader offloader_;
  std::vector<BlockRunner> blocks_;
  std::unique_ptr<BlockRunner> embedding_, head_;
  std::vector<ShardUnit*> in_flight_;  // units whose last reduction may still run
};

}  // namespace regather
