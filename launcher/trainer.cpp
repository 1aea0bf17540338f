#include "launcher/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "tensor/host_view.h"
#include "tensor/recorder.h"

namespace regather {
namespace {

constexpr std::int64_t kStepsToLearn = 2;  // a parameter without any gradient in so many steps is an error
constexpr Label kScalars{"scalars", Pass::Step};
constexpr Label kEvaluationScalars{"scalars", Pass::Evaluation};

// `doubles` values that were summed over the ranks in so many calls.
Ledger::Entries scalars(const Label& label, std::int64_t calls, std::int64_t doubles, int ranks) {
  const std::int64_t bytes = doubles * static_cast<std::int64_t>(sizeof(double));
  return {{{Collective::AllReduce, std::string(label.unit), label.pass, DType::F64},
           {.count = calls, .logical_bytes = bytes, .wire_bytes = bytes * (ranks - 1)}}};
}

Recorder::Interval rest(const char* name) { return {.name = name}; }

std::int64_t counted_tokens(Device& device, const Batch& batch) {  // in a meta run every token counts
  return batch.counted ? *batch.counted
                       : batch.targets.numel() - std::ranges::count(host_view<std::int32_t>(device, batch.targets), -1);
}

double sum(Device& device, const Tensor& token_losses) {
  double total = 0;
  for (const float loss : host_view(device, token_losses)) total += static_cast<double>(loss);
  return total;
}

}  // namespace

Trainer::Trainer(const Model& model, Device& device, Communicator& comm, const TrainerOptions& options)
    : device_(device), comm_(comm), options_(options), parameters_(model.num_parameters()) {
  stack_ =
      std::make_unique<StackRunner>(model, device, comm,
                                    StackOptions{options.checkpoint, options.plan, options.strategy, options.prefetch,
                                                 options.seed, options.compute, options.audit_recompute});
  for (const auto& unit : stack_->units())
    trainable_tensors_ += std::ranges::count_if(unit->table(), &ParamInfo::trainable);
  if (trainable_tensors_ == 0) throw UsageError("model.frozen: every parameter is frozen: there is nothing to train");
  optimizer_ = std::make_unique<ShardedOptimizer>(stack_->units(), device, options.optimizer);
}

Tensor Trainer::loss_weights(const Shape& shape, double total_tokens) {
  Tensor weights(device_.memory, shape, Tag::Workspace);
  write_from_host(device_, weights.fresh(), weights.numel(),
                  [&](float* values) { std::fill_n(values, weights.numel(), static_cast<float>(1.0 / total_tokens)); });
  return weights;
}

Trainer::Sums Trainer::forward_backward(std::span<const Batch> batches, double total_tokens) {
  const Tensor weights = loss_weights(batches[0].targets.shape(), total_tokens);
  std::vector<MicroBatch> micro;
  for (const Batch& b : batches)
    micro.push_back({b.tokens, b.targets, weights, static_cast<std::uint64_t>(b.first_sequence)});
  Sums sums;
  stack_->step(micro, static_cast<std::uint64_t>(steps_done_), [&](int, const Tensor& losses) {
    const Timed timed(device_.recorder, [] { return rest("loss"); });
    sums.loss += sum(device_, losses);
  });
  sums.squares = optimizer_->gradient_squares();
  return sums;
}

StepReport Trainer::step(std::span<const Batch> batches) {
  StepReport report;
  report.step = steps_done_ + 1;
  report.lr = options_.learning_rate.at(report.step);
  comm_.set_where(fmt::format("step {}", report.step));
  return with_context(
      [&] { return comm_.where(); },
      [&] {
        const auto begin = std::chrono::steady_clock::now();
        const Timed timed(device_.recorder, [&] {
          return Recorder::Interval{Recorder::Activity::Scope, "step", fmt::format("{}", report.step)};
        });
        comm_.reset_ledger();
        device_.trace = &trace_;
        const double flops[] = {trace_.forward_flops, trace_.recomputed_flops}, hidden = trace_.hidden_seconds;

        double tokens = 0;
        for (const Batch& b : batches) tokens += static_cast<double>(counted_tokens(device_, b));
        comm_.all_reduce(std::span(&tokens, 1), kScalars);
        report.tokens = static_cast<std::int64_t>(tokens);
        report.skipped = tokens == 0;
        if (!report.skipped) {
          const Sums own = forward_backward(batches, tokens);
          double totals[] = {own.loss, own.squares, asked_to_stop()};
          comm_.all_reduce(totals, kScalars);
          stop_asked_ = totals[2] > 0;
          report.loss = totals[0] / tokens;
          report.grad_norm = std::sqrt(totals[1]);
          report.skipped = !std::isfinite(report.loss) || !std::isfinite(report.grad_norm);
          if (report.skipped && options_.nonfinite == TrainerOptions::Nonfinite::Error)
            throw Error(
                fmt::format("the loss is {} and the gradient's norm is {}; a smaller train.optimizer.lr may "
                            "help, train.nonfinite: skip goes on without the step",
                            std::abs(report.loss), std::abs(report.grad_norm)));  // nan has no sign
          if (!report.skipped) {
            check_every_parameter_learns(report);
            optimizer_->step(report.lr, clip_scale(report.grad_norm, options_.clip_grad_norm), ++updates_);
          }
          for (auto& unit : stack_->units()) unit->parameters_changed();
          for (auto& unit : stack_->units()) unit->finish_refresh();
        }
        report.audit = audit(expected(report), "the step");
        ++steps_done_;
        report.collectives = comm_.ledger().entries();
        report.forward_flops = trace_.forward_flops - flops[0];
        report.recomputed_flops = trace_.recomputed_flops - flops[1];
        report.hidden_seconds = trace_.hidden_seconds - hidden;
        report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        return report;
      });
}

// A parameter that no backward wrote is not part of the loss; one whose gradient is zero in every element, step after
// step, is cut off from it. Both train nothing and would go unnoticed.
void Trainer::check_every_parameter_learns(StepReport& report) {
  std::vector<const ParamInfo*> trainable;
  for (const auto& unit : stack_->units())
    for (std::size_t i = 0; i < unit->table().size(); ++i) {
      const ParamInfo& p = unit->table()[i];
      if (!p.trainable) continue;
      if (!p.optional && !unit->written(static_cast<int>(i)))
        throw Error(
            fmt::format("parameter {} is trainable, but no backward of this step wrote its gradient; declare it "
                        "optional or freeze it",
                        p.name));
      trainable.push_back(&p);
    }
  // Steps that were skipped show nothing, and neither does a rate of zero: half of an adapter learns once the other
  // half has changed.
  if (updates_ >= kStepsToLearn || report.lr == 0) return;
  report.looked_at_each = true;
  std::vector<double> nonzero = optimizer_->nonzero_gradients();
  comm_.all_reduce(nonzero, kScalars);
  learned_.resize(nonzero.size(), 0.0);
  for (std::size_t i = 0; i < nonzero.size(); ++i) learned_[i] += nonzero[i];
  if (updates_ + 1 < kStepsToLearn || device_.meta()) return;
  for (std::size_t i = 0; i < learned_.size(); ++i)
    if (learned_[i] == 0.0 && !trainable[i]->optional)
      throw Error(
          fmt::format("the gradient of parameter {} was zero in every element of the first {} steps; declare it "
                      "optional or freeze it",
                      trainable[i]->name, kStepsToLearn));
}

// Scalars: the tokens; then the loss, the norm and whether to stop; in the first steps which parameters have a
// gradient.
Ledger::Entries Trainer::expected(const StepReport& report) const {
  if (report.tokens == 0) return scalars(kScalars, 1, 1, comm_.size());
  Ledger::Entries entries = stack_->expected();
  entries.merge(scalars(kScalars, report.looked_at_each ? 3 : 2, 4 + (report.looked_at_each ? trainable_tensors_ : 0),
                        comm_.size()));
  return entries;
}

std::vector<std::string> Trainer::audit(const Ledger::Entries& expected, std::string_view what) const {
  const Timed timed(device_.recorder, [] { return rest("audit of communication"); });
  std::vector<std::string> found = differences(expected, comm_.ledger().entries());
  if (found.empty() || options_.audit == TrainerOptions::Audit::Warn) return found;
  std::string text = fmt::format("{} communicated other than planned (communication.audit: error)", what);
  for (const std::string& line : found) text += "\n  " + line;
  throw Error(text);
}

EvaluationReport Trainer::evaluate(std::int64_t batches, const std::function<Batch(std::int64_t)>& batch) {
  return with_context([&] { return fmt::format("evaluation after step {}", steps_done_); },
                      [&] {
                        comm_.set_where(fmt::format("evaluation after step {}", steps_done_));
                        comm_.reset_ledger();
                        double totals[] = {0, 0, 0};
                        for (std::int64_t i = 0; i < batches; ++i) {
                          const Batch b = batch(i);
                          const Tensor losses = stack_->evaluate(b.tokens, b.targets);
                          totals[0] += sum(device_, losses);
                          totals[1] += static_cast<double>(counted_tokens(device_, b));
                        }
                        totals[2] = asked_to_stop();
                        comm_.all_reduce(totals, kEvaluationScalars);
                        stop_asked_ = totals[2] > 0;
                        if (totals[1] == 0) throw Error("no token to evaluate on");
                        Ledger::Entries expected = stack_->expected_of_evaluation(batches);
                        expected.merge(scalars(kEvaluationScalars, 1, 3, comm_.size()));
                        return EvaluationReport{totals[0] / totals[1], audit(expected, "the evaluation")};
                      });
}

}  // namespace regather
