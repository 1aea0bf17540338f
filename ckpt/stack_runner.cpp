#include "ckpt/stack_runner.h"

#include <algorithm>

#include "tensor/recorder.h"

namespace regather {
namespace {

PartUnits part_units(const Model& model) {
  PartUnits units{.blocks = {}, .embedding = model.embedding.units, .head = model.head.units};
  for (const Part& block : model.blocks) {
    check(block.units.size() == 1, "a block has one unit of parameters, not {}", block.units.size());
    units.blocks.push_back(block.units);
  }
  return units;
}

}  // namespace

StackRunner::StackRunner(const Model& model, Device& device, Communicator& comm, const StackOptions& options)
    : model_(model),
      device_(device),
      comm_(comm),
      options_(options),
      part_units_(part_units(model)),
      offloader_(device) {
  options_.plan.segments = options_.checkpoint.segments;
  options_.plan.offload_depth = options_.checkpoint.offload_depth;
  plan_ = make_step_plan(part_units_, static_cast<int>(model.units.size()), options_.plan);
  check(options_.checkpoint.blocks.size() == model.blocks.size(), "a checkpoint plan of {} blocks for a model of {}",
        options_.checkpoint.blocks.size(), model.blocks.size());

  for (std::size_t u = 0; u < model.units.size(); ++u) {
    const bool block =
        std::ranges::any_of(part_units_.blocks, [&](const auto& b) { return b[0] == static_cast<int>(u); });
    units_.push_back(std::make_unique<ShardUnit>(
        model.units[u], block ? "block" : model.units[u].name, device, comm,
        UnitOptions{options_.strategy, options_.seed, std::max(1, plan_.reductions_of_unit[u]), options_.compute}));
  }
  make_runners();
}

// Gradients flow down to the first part that is trained, and no further.
void StackRunner::make_runners() {
  const int micro = options_.plan.micro_batches;
  auto reads = BlockRunner::InputGradients::Unread;
  const auto trains = [&](const std::vector<int>& units) {
    if (std::ranges::any_of(pointers(units), &ShardUnit::has_trainable)) reads = BlockRunner::InputGradients::Read;
  };
  embedding_ = std::make_unique<BlockRunner>(model_.embedding, "embedding", pointers(part_units_.embedding), device_,
                                             keep_all(), micro, reads);
  trains(part_units_.embedding);
  for (std::size_t b = 0; b < model_.blocks.size(); ++b) {
    blocks_.emplace_back(model_.blocks[b], fmt::format("block {}", b), pointers(part_units_.blocks[b]), device_,
                         options_.checkpoint.blocks[b], micro, reads, &offloader_);
    trains(part_units_.blocks[b]);
  }
  head_ =
      std::make_unique<BlockRunner>(model_.head, "head", pointers(part_units_.head), device_, keep_all(), micro, reads);
}

BlockRunner& StackRunner::runner(int part) {
  return part == kEmbedding ? *embedding_ : part == kHead ? *head_ : blocks_[static_cast<std::size_t>(part)];
}

std::vector<ShardUnit*> StackRunner::pointers(const std::vector<int>& units) {
  std::vector<ShardUnit*> out;
  for (int u : units) out.push_back(units_[static_cast<std::size_t>(u)].get());
  return out;
}

std::vector<UnitVolume> StackRunner::volumes() const {
  std::vector<UnitVolume> volumes;
  for (const auto& unit : units_)
    volumes.push_back({unit->ledger_name(), unit->layout(ShardUnit::Part::Trainable).shard(),
                       unit->layout(ShardUnit::Part::Frozen).shard()});
  return volumes;
}

Ledger::Entries StackRunner::expected() const {
  return expected_volume(plan_, volumes(), options_.strategy, comm_.size(), options_.compute);
}

Ledger::Entries StackRunner::expected_of_evaluation(std::int64_t batches) const {
  if (options_.strategy != Strategy::Full) return {};  // replicas are there
  StepPlan forward;                                    // each part gathers what it uses
  for (int part = kEmbedding; part < static_cast<int>(blocks_.size()); ++part)
    forward.entries.push_back({.action = {Pass::Evaluation, part, 0}, .gathers = part_units_.of(part)});
  forward.entries.push_back({.action = {Pass::Evaluation, kHead, 0}, .gathers = part_units_.head});
  Ledger::Entries entries = expected_volume(forward, volumes(), options_.strategy, comm_.size(), options_.compute);
  for (auto& [key, counts] : entries) {
    counts.count *= batches;
    counts.logical_bytes *= batches;
    counts.wire_bytes *= batches;
  }
  return entries;
}

void StackRunner::choose_audited(std::uint64_t step) {
  for (BlockRunner& block : blocks_) block.audit(false);
  const auto every = static_cast<std::uint64_t>(options_.audit_every);
  if (every == 0 || (step + 1) % every != 0) return;
  blocks_[(step / every) % blocks_.size()].audit(true);  // the last one reruns what is cheap
}

void StackRunner::make_resident(const StepPlan::Entry& entry) {
  const auto gathers = pointers(entry.gathers);
  if (std::ranges::all_of(gathers, &ShardUnit::resident)) return;  // prefetched, or replicated
  const auto then = entry.evicts_for_good ? ShardUnit::Then::Done : ShardUnit::Then::UsedAgain;
  for (ShardUnit* unit : pointers(entry.evicts)) unit->evict(then);
  for (ShardUnit* unit : gathers) unit->prefetch(entry.action.pass);
}

void StackRunner::prefetch_after(std::size_t t) {
  std::vector<int> in_use = plan_.entries[t].acquires;  // by this action and those before the one looked at
  for (int ahead = 1; ahead <= options_.prefetch && t + static_cast<std::size_t>(ahead) < plan_.entries.size();
       ++ahead) {
    const StepPlan::Entry& next = plan_.entries[t + static_cast<std::size_t>(ahead)];
    if (std::ranges::any_of(next.evicts, [&](int u) { return std::ranges::find(in_use, u) != in_use.end(); })) return;
    make_resident(next);
    in_use.insert(in_use.end(), next.acquires.begin(), next.acquires.end());
  }
}

void StackRunner::step(std::span<const MicroBatch> batches, std::uint64_t step, const OnLoss& on_loss) {
  check(static_cast<int>(batches.size()) == options_.plan.micro_batches, "a step of {} micro-batches was given {}",
        options_.plan.micro_batches, batches.size());
  struct Guard {  // however the step ends: no tape and no full copy of this step stays behind, nor gradients of a
                  // failed one
    StackRunner& r;
    bool done = false;
    ~Guard() {
      if (done) return;
      r.forget();
      for (auto& unit : r.units_) unit->abandon_step();
    }
  };
  choose_audited(step);
  for (auto& unit : units_) unit->begin_step();
  Guard guard{*this};
  Flow flow(batches.size());
  for (std::size_t t = 0; t < plan_.entries.size(); ++t) {
    if (before_action) before_action(t);
    make_resident(plan_.entries[t]);
    run(t, batches, step, flow, on_loss);
    if (options_.strategy == Strategy::Full)
      for (ShardUnit* unit : pointers(plan_.entries[t].evicts_after)) unit->evict();
  }
  if (before_action) before_action(plan_.entries.size());
  for (auto& unit : units_) unit->finish_reduction();
  forget();
  for (auto& unit : units_) unit->evict();
  for (auto& unit : units_) unit->finish_gathers();  // that nobody read from
  guard.done = true;
}

void StackRunner::run(std::size_t t, std::span<const MicroBatch> batches, std::uint64_t step, Flow& flow,
                      const OnLoss& on_loss) {
  const StepPlan::Entry& entry = plan_.entries[t];
  const Action& a = entry.action;
  const Timed timed(device_.recorder, [&] {
    return Recorder::Interval{Recorder::Activity::Scope, runner(a.part).name(), std::string(name_of(a.pass))};
  });
  const MicroBatch& batch = batches[static_cast<std::size_t>(a.micro_batch)];
  Activations& x = flow[static_cast<std::size_t>(a.micro_batch)];
  BlockRunner& part = runner(a.part);
  for (const StepPlan::Visit& v : entry.fetches) runner(v.block).fetch(v.micro_batch);
  const auto acquired = [&] { prefetch_after(t); };
  const auto reduces = pointers(entry.reduces);
  const int blocks = static_cast<int>(blocks_.size());
  const RngKey key{options_.seed, step, batch.sequence,
                   static_cast<std::uint64_t>(a.part >= 0 ? a.part : blocks - a.part), 0};

  if (a.part == kHead) {
    x.push_back(batch.targets);
    Activations losses;
    x = part.forward_backward(std::exchange(x, {}), {batch.loss_weight}, key, reduces, acquired, losses);
    x.pop_back();  // targets have no gradient
    on_loss(a.micro_batch, losses.at(0));
  } else if (a.pass == Pass::Forward) {
    if (a.part == kEmbedding) x = {batch.tokens};
    const auto keep = a.keep_activations ? BlockRunner::Keep::Costly
                      : entry.offloads   ? BlockRunner::Keep::AsPlanned
                                         : BlockRunner::Keep::InPlace;
    x = part.forward(a.micro_batch, std::exchange(x, {}), key, keep, acquired);
    if (!a.keep_input) part.drop_inputs(a.micro_batch);
  } else if (a.pass == Pass::Replay) {
    blocks_[static_cast<std::size_t>(a.part) + 1].bind_inputs(a.micro_batch, part.replay(a.micro_batch, acquired));
  } else {
    const auto reads = entry.acquires.empty() ? BlockRunner::Reads::NoParameters : BlockRunner::Reads::Parameters;
    x = part.backward(a.micro_batch, std::exchange(x, {}), reduces, reads, acquired);
    if (a.part == kEmbedding) x.clear();
  }
  for (const StepPlan::Visit& v : entry.leaves) runner(v.block).leave(v.micro_batch);
  if (!reduces.empty()) {  // a reduction overlaps with the backward that follows it, and ends before the next but one
    for (ShardUnit* unit : in_flight_)
      if (std::ranges::find(reduces, unit) == reduces.end()) unit->finish_reduction();
    in_flight_ = reduces;
  }
}

void StackRunner::forget() noexcept {
  in_flight_.clear();
  embedding_->forget();
  head_->forget();
  for (BlockRunner& block : blocks_) block.forget();
}

Tensor StackRunner::evaluate(const Tensor& tokens, const Tensor& targets) {
  struct Guard {
    StackRunner& r;
    ~Guard() {
      for (auto& unit : r.units_) unit->abandon_copies();
    }
  };
  const Guard guard{*this};
  Activations x{tokens};
  for (int part = kEmbedding; part < static_cast<int>(blocks_.size()) + 1; ++part) {
    const int p = part == static_cast<int>(blocks_.size()) ? kHead : part;
    if (p == kHead) x.push_back(targets);
    x = runner(p).evaluate(x, nullptr);
    if (options_.strategy == Strategy::Full)
      for (ShardUnit* unit : pointers(part_units_.of(p))) unit->evict();
  }
  for (auto& unit : units_) unit->finish_gathers();
  return x.at(0);
}

}  // namespace regather
