#include "tensor/tape.h"

#include <algorithm>
#include <atomic>

#include "tensor/block.h"
#include "tensor/hash.h"
#include "tensor/trace.h"

namespace regather {

SavePlan keep_only(const std::vector<std::string>& marks) {
  SavePlan plan = drop_all();
  for (const auto& name : marks) plan.marks[name] = Placement::Keep;
  return plan;
}

std::vector<std::string> SavePlan::placed(Placement where) const {
  std::vector<std::string> names;
  for (const auto& [name, placement] : marks)
    if (placement == where) names.push_back(name);
  return names;
}

Tape::Tape(Device& device, SavePlan plan, RngKey key, Offloader* offloader)
    : device_(device), plan_(std::move(plan)), key_(key), offloader_(offloader) {
  static std::atomic<std::uint32_t> next{0};  // serials only tell tapes apart
  do serial_ = ++next;
  while (serial_ == 0);
}

// ---- recording ------------------------------------------------------------------------------------------------------

int Tape::new_value(const Tensor& t, int producer, bool needs_grad) {
  Value v;
  v.type = {t.shape(), t.dtype()};
  v.producer = producer;
  v.needs_grad = needs_grad;
  v.placement = producer < 0 ? Placement::Keep : plan_.unmarked;
  v.version = t.version();
  values_.push_back(std::move(v));
  return static_cast<int>(values_.size()) - 1;
}

std::string Tape::label(const Value& v) const {
  if (!v.name.empty()) return v.name;
  if (v.producer < 0) return "input or constant";
  const Node& n = nodes_.at(static_cast<std::size_t>(v.producer));
  return fmt::format("{}.{}", n.op->name(), v.producer);
}

std::string Tape::label(const Node& n) const {  // "gelu (mlp.act)"
  for (int id : n.out)
    if (!value(id).name.empty()) return fmt::format("{} ({})", n.op->name(), value(id).name);
  return std::string(n.op->name());
}

Tape::Value& Tape::own(const Tensor& t, std::string_view where) {
  if (t.tape != serial_) throw LogicError(fmt::format("{}: the tensor is not a value of this tape", where));
  Value& v = value(t.id);
  if (t.version() != v.version)
    throw LogicError(fmt::format("{}: value '{}' was modified in place after it was recorded", where, label(v)));
  return v;
}

Tensor Tape::input(Tensor x, bool needs_grad) {
  x.id = new_value(x, -1, needs_grad);
  x.tape = serial_;
  inputs_.push_back(x.id);
  value(x.id).placement = plan_.inputs;
  hold(value(x.id), x);
  return x;
}

void Tape::hold(Value& v, const Tensor& t) {
  if (v.placement == Placement::Drop || v.data) return;
  v.data = t.view(v.type.shape);  // whatever shape this reader sees it in
  v.held = true;
}

int Tape::adopt(Tensor& t, const Op& op) {
  if (t.tape == 0) {  // made outside the tape: a constant, kept (user code is not run again)
    const Tensor constant = t;
    t.id = new_value(constant, -1, false);
    t.tape = serial_;
    hold(value(t.id), constant);
  }
  own(t, op.name());
  return t.id;
}

// All that the rerun reads is held anyway: for the operation's own backward, or as an input of the block.
bool Tape::runs_again_for_little(const Node& n) const {
  for (std::size_t i = 0; i < n.in.size(); ++i)
    if (!has(n.saved.inputs, i) && value(n.in[i]).producer >= 0) return false;
  return n.op->cheap() && n.saved.outputs == 0;
}

Activations Tape::record(std::unique_ptr<const Op> op, Activations in, const ParamView& params,
                         std::vector<int> param_ids) {
  if (phase_ != Phase::Recording) throw LogicError("record: this tape is no longer recording");
  last_outputs_.clear();
  Node n;
  n.op = std::move(op);
  n.params = std::move(param_ids);
  n.key = key_;
  n.key.op = nodes_.size();
  check(in.size() <= 32, "{}: {} inputs; an operation has at most 32", n.op->name(), in.size());
  for (std::size_t i = 0; i < in.size(); ++i) {
    n.in.push_back(adopt(in[i], *n.op));
    n.shapes.push_back(in[i].shape());
    check(!value(n.in[i]).pinned, "{}: '{}' is computed in backward and cannot be read in forward", n.op->name(),
          label(value(n.in[i])));
    if (value(n.in[i]).needs_grad) n.needs.inputs |= Set{1} << i;
  }
  for (std::size_t k = 0; k < n.params.size(); ++k)
    if (params.info(n.params[k]).trainable) n.needs.params |= Set{1} << k;
  const bool needs_grad = n.needs.inputs != 0 || n.needs.params != 0;
  if (needs_grad) n.saved = n.op->saved(n.needs);

  Activations out = run_node(n, in, params, Trace::Kind::Run);
  const int index = static_cast<int>(nodes_.size());
  const bool again = plan_.cheap == Placement::Drop && runs_again_for_little(n);
  for (std::size_t i = 0; i < out.size(); ++i) {
    Tensor& y = out[i];
    y.id = new_value(y, index, needs_grad);
    y.tape = serial_;
    if (again) value(y.id).placement = Placement::Drop;
    if (n.op->fused_with_backward()) {
      check(has(n.saved.outputs, i), "{}: an output of a fused loss must be declared saved", n.op->name());
      value(y.id).pinned = true;
      value(y.id).placement = Placement::Keep;
    } else if (plan_.verify && !device_.meta()) {
      value(y.id).hash = hash_of(device_, y);
    }
    n.out.push_back(y.id);
  }
  auto save = [&](const Tensor& t) {
    value(t.id).saved = true;
    hold(value(t.id), t);
  };
  for (std::size_t i = 0; i < in.size(); ++i)
    if (has(n.saved.inputs, i)) save(in[i]);
  for (std::size_t i = 0; i < out.size(); ++i)
    if (has(n.saved.outputs, i)) {
      save(out[i]);
      if (out.size() > 1) last_outputs_.push_back(out[i]);
    }
  nodes_.push_back(std::move(n));
  return out;
}

Tensor Tape::mark(std::string_view name, Tensor y) {
  Value& v = own(y, "mark");
  v.name = name;
  const auto placed = plan_.marks.find(name);
  if (placed == plan_.marks.end() || v.producer < 0 || v.pinned) return y;
  const auto place = [&](Value& one, const Tensor& t) {
    one.placement = placed->second;
    one.data.reset();  // undo the default placement
    one.held = false;
    hold(one, t);
  };
  place(v, y);
  for (const Tensor& t : last_outputs_) {
    Value& sibling = value(t.id);
    if (sibling.producer == v.producer && sibling.name.empty() && !sibling.pinned) place(sibling, t);
  }
  return y;
}

void Tape::outputs(const Activations& y) {
  last_outputs_.clear();
  for (const Tensor& t : y) {
    own(t, "outputs");
    outputs_.push_back({t.id, t.shape()});
  }
  find_flow(differentiable_outputs());
  count_uses(false, true);
  for (Value& v : values_) {
    if (v.uses == 0 && v.producer >= 0) {
      v.data.reset();
      v.held = false;
    }
    if (v.uses == 0 || !v.data || v.placement != Placement::Offload) continue;
    if (!offloader_)
      throw LogicError(fmt::format("value '{}' is to be offloaded by a tape without offloader", label(v)));
    if (device_.trace) device_.trace->line("store " + label(v));
    v.away = Offloaded(*offloader_, std::move(v.data));
  }
}

void Tape::leave() {
  for (Value& v : values_) v.away.leave();
}

void Tape::fetch() {
  for (auto v = values_.rbegin(); v != values_.rend(); ++v) {
    if (!v->away) continue;
    if (device_.trace) device_.trace->line("fetch " + label(*v));
    v->away.fetch();
  }
}

std::vector<bool> Tape::differentiable_outputs() const {
  std::vector<bool> all;
  for (const Output& y : outputs_) all.push_back(value(y.id).needs_grad);
  return all;
}

void Tape::drop_inputs() {
  for (int id : inputs_) {
    value(id).free();
    value(id).held = false;
  }
}

void Tape::bind_inputs(const Activations& x) {
  check(x.size() == inputs_.size(), "bind_inputs: {} values for {} inputs", x.size(), inputs_.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    Value& v = value(inputs_[i]);
    check(x[i].shape() == v.type.shape, "bind_inputs: input {} is {}, it was {} in forward", i,
          x[i].shape().to_string(), v.type.shape.to_string());
    v.data = x[i];
    v.version = x[i].version();
    v.held = true;
  }
}

Recorder::Interval Tape::interval(const Node& n, Recorder::Activity activity, const ParamView& params) const {
  std::vector<ValueType> types;
  std::vector<Shape> shapes;
  for (std::size_t i = 0; i < n.in.size(); ++i) types.push_back({n.shapes[i], value(n.in[i]).type.dtype});
  for (int id : n.params) shapes.push_back(params.info(id).shape);
  const bool backward = activity == Recorder::Activity::Backward;
  const auto direction = backward ? Op::Direction::Backward : Op::Direction::Forward;
  const auto marked = std::ranges::find_if(n.out, [&](int id) { return !value(id).name.empty(); });
  return {.activity = activity,
          .name = std::string(n.op->name()),
          .detail = marked == n.out.end() ? "" : value(*marked).name,
          .work = n.op->work(direction, types, shapes, n.needs)};
}

Activations Tape::run_node(Node& n, std::span<const Tensor> in, const ParamView& params, Trace::Kind kind) {
  const bool again = kind == Trace::Kind::Rerun;
  if (!again) n.flops = flops_of(*n.op, in, params, n.params);
  return with_context([&] { return again ? "rerun of " + label(n) : std::string(n.op->name()); },
                      [&] {
                        if (device_.trace) device_.trace->operation(kind, n.op->name(), n.flops);
                        const Shadowed shadowed(again ? device_.trace : nullptr);
                        if (n.op->fused_with_backward()) {
                          const Allocator::Asking asking(device_.memory, n.op->name());
                          return allocate_outputs(*n.op, device_, in, params, n.params);
                        }
                        using enum Recorder::Activity;
                        const Timed timed(device_.recorder,
                                          [&] { return interval(n, again ? Recompute : Forward, params); });
                        return execute(*n.op, device_, in, params, n.params, n.key);
                      });
}

std::vector<Tape::ValueReport> Tape::report() const {
  std::vector<ValueReport> rows;
  for (const Value& v : values_) {
    const Node* n = v.producer < 0 ? nullptr : &nodes_[static_cast<std::size_t>(v.producer)];
    const auto state = v.away    ? ValueState::Offloaded
                       : !v.data ? ValueState::Dropped
                       : v.held  ? ValueState::Kept
                                 : ValueState::Materialised;
    const std::int64_t bytes = v.type.shape.numel() * static_cast<std::int64_t>(size_of(v.type.dtype));
    rows.push_back({label(v), n ? std::string(n->op->name()) : "input", bytes, v.saved, !v.name.empty(),
                    n ? n->flops : 0.0, state});
  }
  return rows;
}

}  // namespace regather
