#include "ckpt/block_runner.h"

#include <algorithm>

namespace regather {
namespace {

SavePlan in_place(SavePlan plan) {
  const auto stays = [](Placement& p) { p = p == Placement::Offload ? Placement::Keep : p; };
  stays(plan.unmarked);
  stays(plan.inputs);
  for (auto& [name, placement] : plan.marks) stays(placement);
  return plan;
}

SavePlan in_order(SavePlan plan, Order order) {
  plan.order = order;
  return plan;
}

// While it lives, reruns know whether the gather that they run under is in flight.
class Shadow {
 public:
  Shadow(Device& device, const std::vector<ShardUnit*>& units) : trace_(device.trace) {
    if (trace_) trace_->in_flight = [&units] { return std::ranges::any_of(units, &ShardUnit::in_flight); };
  }
  ~Shadow() {
    if (trace_) trace_->in_flight = nullptr;
  }
  Shadow(const Shadow&) = delete;
  Shadow& operator=(const Shadow&) = delete;

 private:
  Trace* trace_;
};

}  // namespace

BlockRunner::BlockRunner(const Part& part, std::string name, std::vector<ShardUnit*> units, Device& device,
                         SavePlan plan, int micro_batches, InputGradients input_gradients, Offloader* offloader)
    : part_(part),
      name_(std::move(name)),
      units_(std::move(units)),
      device_(device),
      plan_(std::move(plan)),
      offloader_(offloader),
      input_gradients_(input_gradients),
      tapes_(static_cast<std::size_t>(micro_batches)) {}

std::vector<ShardUnit::Lease> BlockRunner::acquire(Pass pass, const Acquired& acquired) {
  std::vector<ShardUnit::Lease> leases;
  for (ShardUnit* unit : units_) leases.push_back(unit->acquire(pass));
  if (acquired) acquired();
  return leases;
}

ParamView BlockRunner::view() const {
  ParamView params;
  for (ShardUnit* unit : units_) params.append(*unit);
  return params;
}

Gradients BlockRunner::gradients(const std::vector<ShardUnit*>& reduces) {
  Gradients grads;
  for (ShardUnit* unit : units_) {
    const bool reduced_now = std::ranges::find(reduces, unit) != reduces.end();
    grads.append(unit->gradients(reduced_now ? Tag::Workspace : Tag::Gradients),
                 static_cast<int>(unit->table().size()));
  }
  return grads;
}

Activations BlockRunner::record(Tape& tape, Activations x, const ParamView& params) {
  const bool read = input_gradients_ == InputGradients::Read;
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = tape.input(std::move(x[i]), read && part_.block->differentiable(i));
  Run run{device_, params, &tape};
  Activations y = part_.block->forward(run, x);
  x.clear();
  tape.outputs(y);
  return y;
}

Activations BlockRunner::forward(int micro_batch, Activations x, const RngKey& key, Keep keep,
                                 const Acquired& acquired) {
  return with_context([&] { return name_ + " forward"; },
                      [&] {
                        const auto leases = acquire(Pass::Forward, acquired);
                        auto& tape = tapes_.at(static_cast<std::size_t>(micro_batch));
                        SavePlan plan = plan_;
                        if (keep == Keep::InPlace) plan = in_place(std::move(plan));
                        if (keep == Keep::Costly) plan = in_order(keep_costly(), plan.order);
                        plan.verify = audit_;
                        tape = std::make_unique<Tape>(device_, std::move(plan), key, offloader_);
                        return record(*tape, std::move(x), view());
                      });
}

void BlockRunner::drop_inputs(int micro_batch) { tapes_.at(static_cast<std::size_t>(micro_batch))->drop_inputs(); }

void BlockRunner::bind_inputs(int micro_batch, const Activations& x) {
  with_context([&] { return name_; }, [&] { tapes_.at(static_cast<std::size_t>(micro_batch))->bind_inputs(x); });
}

Activations BlockRunner::replay(int micro_batch, const Acquired& acquired) {
  return with_context([&] { return name_ + " replay"; },
                      [&] {
                        const auto leases = acquire(Pass::Replay, acquired);
                        const Shadow shadow(device_, units_);
                        return tapes_.at(static_cast<std::size_t>(micro_batch))->replay(view(), Retain::Nothing);
                      });
}

Activations BlockRunner::backward(int micro_batch, Activations dy, const std::vector<ShardUnit*>& reduces, Reads reads,
                                  const Acquired& acquired) {
  return with_context([&] { return name_ + " backward"; },
                      [&] {
                        const auto tape = std::move(tapes_.at(static_cast<std::size_t>(micro_batch)));
                        auto leases = reads == Reads::Parameters
                                          ? acquire(Pass::Backward, acquired)  // the only all-gather of this backward
                                          : std::vector<ShardUnit::Lease>();
                        if (reads == Reads::NoParameters && acquired) acquired();
                        const Shadow shadow(device_, units_);
                        Activations dx = tape->backward(view(), std::move(dy),
                                                        gradients(reduces));  // reruns what it lacks under this lease
                        leases.clear();
                        for (ShardUnit* unit : reduces) unit->reduce();
                        return dx;
                      });
}

Activations BlockRunner::forward_backward(Activations x, Activations dy, const RngKey& key,
                                          const std::vector<ShardUnit*>& reduces, const Acquired& acquired,
                                          Activations& y) {
  return with_context([&] { return name_; },
                      [&] {
                        auto leases = acquire(Pass::Backward, acquired);
                        Tape tape(device_, plan_, key);
                        y = record(tape, std::move(x), view());
                        Activations dx = tape.backward(view(), std::move(dy), gradients(reduces));
                        leases.clear();
                        for (ShardUnit* unit : reduces) unit->reduce();
                        return dx;
                      });
}

Activations BlockRunner::evaluate(const Activations& x, const Acquired& acquired) {
  return with_context([&] { return name_ + " evaluation"; },
                      [&] {
                        const auto leases = acquire(Pass::Evaluation, acquired);
                        const ParamView params = view();
                        Run run{device_, params};
                        return part_.block->forward(run, x);
                      });
}

void BlockRunner::leave(int micro_batch) {
  with_context([&] { return name_ + " forward"; }, [&] { tapes_.at(static_cast<std::size_t>(micro_batch))->leave(); });
}

void BlockRunner::fetch(int micro_batch) {
  with_context([&] { return name_ + " backward"; }, [&] { tapes_.at(static_cast<std::size_t>(micro_batch))->fetch(); });
}

void BlockRunner::forget() noexcept {
  for (auto& tape : tapes_) tape.reset();
}

}  // namespace regather
