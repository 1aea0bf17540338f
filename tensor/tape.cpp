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

Tape::Tape(Device& device, SavePlan plan, RngKey key) : device_(device), plan_(std::move(plan)), key_(key) {
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

Activations Tape::record(std::unique_ptr<const Op> op, Activations in, const ParamView& params,
                         std::vector<int> param_ids) {
  if (phase_ != Phase::Recording) throw LogicError("record: this tape is no longer recording");
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
  for (std::size_t i = 0; i < out.size(); ++i) {
    Tensor& y = out[i];
    y.id = new_value(y, index, needs_grad);
    y.tape = serial_;
    if (n.op->fused_with_backward()) {
      check(has(n.saved.outputs, i), "{}: an output of a fused loss must be declared saved", n.op->name());
      value(y.id).pinned = true;
      value(y.id).placement = Placement::Keep;
    } else if (plan_.verify && !device_.meta()) {
      value(y.id).hash = hash_of(y);
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
    if (has(n.saved.outputs, i)) save(out[i]);
  nodes_.push_back(std::move(n));
  return out;
}

Tensor Tape::mark(std::string_view name, Tensor y) {
  Value& v = own(y, "mark");
  v.name = name;
  const auto placed = plan_.marks.find(name);
  if (placed == plan_.marks.end() || v.producer < 0 || v.pinned) return y;
  v.placement = placed->second;
  v.data.reset();  // undo the default placement
  v.held = false;
  hold(v, y);
  return y;
}

void Tape::outputs(const Activations& y) {
  for (const Tensor& t : y) {
    own(t, "outputs");
    outputs_.push_back({t.id, t.shape()});
  }
}

void Tape::drop_inputs() {
  for (int id : inputs_) {
    value(id).data.reset();
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

// ---- running again --------------------------------------------------------------------------------------------------

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

template <class F>
void Tape::for_saved(Node& n, F f) {
  for (std::size_t i = 0; i < n.in.size(); ++i)
    if (has(n.saved.inputs, i)) f(n.in[i]);
  for (std::size_t i = 0; i < n.out.size(); ++i)
    if (has(n.saved.outputs, i)) f(n.out[i]);
}

void Tape::find_flow(const std::vector<bool>& output_has_gradient) {
  std::vector<bool> arrives(values_.size(), false);
  for (std::size_t k = 0; k < outputs_.size(); ++k)
    if (output_has_gradient[k]) arrives[static_cast<std::size_t>(outputs_[k].id)] = true;
  for (auto n = nodes_.rbegin(); n != nodes_.rend(); ++n) {
    n->flows = (n->needs.inputs != 0 || n->needs.params != 0) &&
               std::ranges::any_of(n->out, [&](int id) { return arrives[static_cast<std::size_t>(id)]; });
    if (!n->flows) continue;
    for (std::size_t i = 0; i < n->in.size(); ++i)
      if (has(n->needs.inputs, i)) arrives[static_cast<std::size_t>(n->in[i])] = true;
  }
}

// The whole plan of a backward in one pass, latest node first: a node is rerun if a value it makes will be read and is
// not there; its inputs then have one more reader. Counts are exact, so every value is freed at its last use.
void Tape::count_uses(bool for_caller, bool for_backward) {
  for (Value& v : values_) v.uses = 0;
  if (for_caller)
    for (const Output& y : outputs_) ++value(y.id).uses;
  if (for_backward)
    for (Node& n : nodes_)
      if (n.flows) for_saved(n, [&](int id) { ++value(id).uses; });
  for (auto n = nodes_.rbegin(); n != nodes_.rend(); ++n) {
    n->queued = false;
    n->rerun = std::ranges::any_of(n->out, [&](int id) { return value(id).uses > 0 && !value(id).data; });
    if (n->rerun)
      for (int id : n->in) ++value(id).uses;
  }
}

const Tensor& Tape::materialise(int id, const ParamView& params) {
  Value& wanted = value(id);
  if (!wanted.data) {  // no recursion: collect the nodes, run them in the order of recording
    std::vector<int> missing{id}, todo;
    while (!missing.empty()) {
      const Value& v = value(missing.back());
      missing.pop_back();
      if (v.producer < 0) throw LogicError("a dropped block input was not bound before backward");
      Node& n = node(v.producer);
      if (std::exchange(n.queued, true)) continue;
      todo.push_back(v.producer);
      for (int input : n.in)
        if (!value(input).data) missing.push_back(input);
    }
    std::ranges::sort(todo);
    for (int n : todo) rerun(node(n), params);
  }
  if (wanted.data.version() != wanted.version)
    throw LogicError(fmt::format("value '{}' was modified in place while the tape held it", label(wanted)));
  return wanted.data;
}

void Tape::rerun(Node& n, const ParamView& params) {
  Activations in;
  for (std::size_t i = 0; i < n.in.size(); ++i)  // all there: nothing is run here
    in.push_back(materialise(n.in[i], params).view(n.shapes[i]));
  Activations out = run_node(n, in, params, Trace::Kind::Rerun);
  in.clear();
  for (std::size_t i = 0; i < out.size(); ++i) {
    Value& v = value(n.out[i]);
    check(out[i].shape() == v.type.shape, "rerun of {} made {} where forward made {} ('{}')", n.op->name(),
          out[i].shape().to_string(), v.type.shape.to_string(), label(v));
    if (plan_.verify && !device_.meta() && hash_of(out[i]) != v.hash)
      throw Error(fmt::format("operation {} made other numbers when run again: '{}'", n.op->name(), label(v)));
    if (v.uses == 0 || v.data) continue;
    v.data = std::move(out[i]);
    v.version = v.data.version();
  }
  out.clear();
  n.rerun = false;
  for (int id : n.in) release(id);
}

void Tape::release(int id) {  // replay() gives back only what it made itself; backward frees everything
  Value& v = value(id);
  if (--v.uses > 0 || (v.held && phase_ == Phase::Replaying)) return;
  v.data.reset();
}

void Tape::rerun_first(const ParamView& params) {
  if (plan_.order == Order::Lazy) return;
  for (Node& n : nodes_) {
    const bool eager = plan_.order == Order::Eager;
    const bool ready = std::ranges::all_of(n.in, [&](int id) { return static_cast<bool>(value(id).data); });
    if (n.rerun && (eager || (ready && n.params.empty()))) {
      n.queued = true;
      rerun(n, params);
    }
  }
}

Activations Tape::replay(const ParamView& params, Retain retain) {
  if (phase_ == Phase::Backward || phase_ == Phase::Spent) throw LogicError("replay: this tape is spent");
  phase_ = Phase::Replaying;
  return spent_if_throws([&] { return run_replay(params, retain); });
}

Activations Tape::run_replay(const ParamView& params, Retain retain) {
  std::vector<bool> differentiable;
  for (const Output& y : outputs_) differentiable.push_back(value(y.id).needs_grad);
  find_flow(differentiable);
  count_uses(true, retain == Retain::Saved);
  Activations y;
  for (const Output& out : outputs_) {
    y.push_back(materialise(out.id, params).view(out.shape));
    y.back().tape = 0;
  }
  for (const Output& out : outputs_) release(out.id);
  if (retain == Retain::Saved)
    for (Node& n : nodes_)
      if (n.flows)
        for_saved(n, [&](int id) {
          materialise(id, params);
          value(id).held = true;
        });
  return y;
}

template <class F>
Activations Tape::spent_if_throws(F f) {
  try {
    return f();
  } catch (...) {
    for (Value& v : values_) v.data.reset();
    phase_ = Phase::Spent;
    throw;
  }
}

// ---- backward -------------------------------------------------------------------------------------------------------

Activations Tape::backward(const ParamView& params, Activations dy, const Gradients& grads) {
  if (phase_ == Phase::Backward || phase_ == Phase::Spent) throw LogicError("backward: this tape is spent");
  check(dy.size() == outputs_.size(), "backward: {} gradients for {} outputs", dy.size(), outputs_.size());
  for (std::size_t k = 0; k < outputs_.size(); ++k)
    check(!dy[k] || dy[k].shape() == outputs_[k].shape, "backward: gradient {} is {}, the output is {}", k,
          dy[k].shape().to_string(), outputs_[k].shape.to_string());
  phase_ = Phase::Backward;
  return spent_if_throws([&] { return run_backward(params, std::move(dy), grads); });
}

Activations Tape::run_backward(const ParamView& params, Activations dy, const Gradients& grads) {
  std::vector<Tensor> gradient(values_.size());
  std::vector<bool> given;
  for (std::size_t k = 0; k < outputs_.size(); ++k) {
    given.push_back(static_cast<bool>(dy[k]));
    if (given[k]) add_gradient(gradient, outputs_[k].id, std::exchange(dy[k], {}));
  }
  find_flow(given);
  count_uses(false, true);
  for (Value& v : values_)
    if (v.uses == 0) v.data.reset();  // kept, but nobody will read it
  rerun_first(params);
  for (auto n = nodes_.rbegin(); n != nodes_.rend(); ++n)
    if (n->flows) backward_node(*n, gradient, params, grads);

  Activations dx;
  for (int id : inputs_) {
    dx.push_back(std::move(gradient[static_cast<std::size_t>(id)]));
    value(id).data.reset();
  }
  phase_ = Phase::Spent;
  for (const Value& v : values_)
    if (v.data) throw LogicError(fmt::format("internal: value '{}' outlived backward", label(v)));
  return dx;
}

void Tape::backward_node(Node& n, std::vector<Tensor>& gradient, const ParamView& params, const Gradients& grads) {
  Activations in(n.in.size()), out(n.out.size()), dout, din(n.in.size());
  for_saved(n, [&](int id) { materialise(id, params); });
  with_context(
      [&] { return label(n); },
      [&] {
        const Timed timed(device_.recorder, [&] { return interval(n, Recorder::Activity::Backward, params); });
        const Allocator::Asking asking(device_.memory, n.op->name());
        for (std::size_t i = 0; i < in.size(); ++i)
          if (has(n.saved.inputs, i)) in[i] = value(n.in[i]).data.view(n.shapes[i]);
        for (std::size_t i = 0; i < out.size(); ++i)
          if (has(n.saved.outputs, i)) out[i] = value(n.out[i]).data;
        for (int id : n.out) dout.push_back(std::move(gradient[static_cast<std::size_t>(id)]));
        const bool passes = n.op->passes_gradient();
        std::vector<ValueType> types;
        std::vector<Shape> param_shapes;
        for (std::size_t i = 0; i < din.size(); ++i) types.push_back({n.shapes[i], value(n.in[i]).type.dtype});
        for (int id : n.params) param_shapes.push_back(params.info(id).shape);
        for (std::size_t i = 0; i < din.size(); ++i)
          if (has(n.needs.inputs, i))
            din[i] = passes ? dout[0].view(n.shapes[i])
                            : Tensor(device_.memory, types[i].shape, Tag::Workspace, types[i].dtype);
        const Buffer workspace(device_.memory, n.op->workspace(Op::Direction::Backward, types, param_shapes),
                               Tag::Workspace);
        if (device_.trace) device_.trace->operation(Trace::Kind::Backward, n.op->name(), 0);
        if (!device_.meta())
          n.op->backward({{device_, in, out, &params, n.params, n.key, workspace.data<float>()}, dout, din, &grads});
        else
          for (int id : n.params) grads.data(id);  // what a backward writes, it writes in a meta run too
        if (device_.between_ops) device_.between_ops();
      });
  in.clear();
  out.clear();
  dout.clear();
  for_saved(n, [&](int id) { release(id); });
  for (std::size_t i = 0; i < din.size(); ++i)
    if (din[i]) add_gradient(gradient, n.in[i], std::exchange(din[i], {}));
}

void Tape::add_gradient(std::vector<Tensor>& gradient, int id, Tensor part) {
  Tensor& sum = gradient[static_cast<std::size_t>(id)];
  if (!sum) {
    sum = part.view(value(id).type.shape);
    return;
  }
  const bool in_place = sum.sole_owner();  // a gradient that an identity passed on is shared: never written to
  Tensor total = in_place ? sum : Tensor(device_.memory, sum.shape(), Tag::Workspace, sum.dtype());
  device_.add(Stream::Compute, total.fresh(), sum.data(), part.data(), sum.numel());
  sum = std::move(total);
}

std::vector<Tape::ValueReport> Tape::report() const {
  std::vector<ValueReport> rows;
  for (const Value& v : values_) {
    const Node* n = v.producer < 0 ? nullptr : &nodes_[static_cast<std::size_t>(v.producer)];
    const auto state = !v.data ? ValueState::Dropped : v.held ? ValueState::Kept : ValueState::Materialised;
    const std::int64_t bytes = v.type.shape.numel() * static_cast<std::int64_t>(size_of(v.type.dtype));
    rows.push_back({label(v), n ? std::string(n->op->name()) : "input", bytes, v.saved, n ? n->flops : 0.0, state});
  }
  return rows;
}

}  // namespace regather
