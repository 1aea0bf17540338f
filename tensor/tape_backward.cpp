// The half of the tape that runs after forward: reruns, replay, backward.
#include <algorithm>

#include "tensor/hash.h"
#include "tensor/tape.h"

namespace regather {

// ---- running again --------------------------------------------------------------------------------------------------

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
    n->rerun = std::ranges::any_of(n->out, [&](int id) { return value(id).uses > 0 && !value(id).there(); });
    if (n->rerun)
      for (int id : n->in) ++value(id).uses;
  }
}

const Tensor& Tape::materialise(int id, const ParamView& params) {
  Value& wanted = value(id);
  if (!wanted.there()) {  // no recursion: collect the nodes, run them in the order of recording
    std::vector<int> missing{id}, todo;
    while (!missing.empty()) {
      const Value& v = value(missing.back());
      missing.pop_back();
      if (v.producer < 0) throw LogicError("a dropped block input was not bound before backward");
      Node& n = node(v.producer);
      if (std::exchange(n.queued, true)) continue;
      todo.push_back(v.producer);
      for (int input : n.in)
        if (!value(input).there()) missing.push_back(input);
    }
    std::ranges::sort(todo);
    for (int n : todo) rerun(node(n), params);
  }
  if (wanted.away) bring_back(wanted);
  if (wanted.data.version() != wanted.version)
    throw LogicError(fmt::format("value '{}' was modified in place while the tape held it", label(wanted)));
  return wanted.data;
}

void Tape::bring_back(Value& v) {
  v.data = v.away.take();
  v.version = v.data.version();
  if (plan_.verify && !device_.meta() && v.producer >= 0 && hash_of(device_, v.data) != v.hash)
    throw Error(fmt::format("value '{}' came back from the host with other numbers", label(v)));
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
    if (plan_.verify && !device_.meta() && hash_of(device_, out[i]) != v.hash)
      throw Error(fmt::format("operation {} made other numbers when run again: '{}'", n.op->name(), label(v)));
    if (v.uses == 0 || v.there()) continue;
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
  v.free();
}

void Tape::rerun_first(const ParamView& params) {
  if (plan_.order == Order::Lazy) return;
  for (Node& n : nodes_) {
    const bool eager = plan_.order == Order::Eager;
    const bool ready = std::ranges::all_of(n.in, [&](int id) { return value(id).there(); });
    const bool vectors = std::ranges::all_of(n.params, [&](int id) { return params.info(id).shape.ndim() == 1; });
    if (n.rerun && (eager || (ready && vectors))) {
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
  find_flow(differentiable_outputs());
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
    for (Value& v : values_) v.free();
    phase_ = Phase::Spent;
    throw;
  }
}

// ---- backward -------------------------------------------------------------------------------------------------------

Activations Tape::backward(const ParamView& params, Activations dy, const Gradients& grads) {
  if (phase_ == Phase::Backward || phase_ == Phase::Spent) throw LogicError("backward: this tape is spent");
  check(dy.size() == outputs_.size(), "backward: {} gradients for {} outputs", dy.size(), outputs_.size());
  for (std::size_t k = 0; k < outputs_.size(); ++k) {
    if (!dy[k]) continue;
    const DType type = value(outputs_[k].id).type.dtype;
    check(dy[k].shape() == outputs_[k].shape, "backward: gradient {} is {}, the output is {}", k,
          dy[k].shape().to_string(), outputs_[k].shape.to_string());
    check(dy[k].dtype() == type, "backward: gradient {} is {}, the output is {}", k, name_of(dy[k].dtype()),
          name_of(type));
  }
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
    if (v.uses == 0) v.free();  // kept, but nobody will read it
  rerun_first(params);
  for (auto n = nodes_.rbegin(); n != nodes_.rend(); ++n)
    if (n->flows) backward_node(*n, gradient, params, grads);

  Activations dx;
  for (int id : inputs_) {
    dx.push_back(std::move(gradient[static_cast<std::size_t>(id)]));
    value(id).free();
  }
  phase_ = Phase::Spent;
  for (const Value& v : values_)
    if (v.there()) throw LogicError(fmt::format("internal: value '{}' outlived backward", label(v)));
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
        const Buffer workspace(device_.memory,
                               n.op->workspace(device_.kind(), Op::Direction::Backward, types, param_shapes),
                               Tag::Workspace);
        if (device_.trace) device_.trace->operation(Trace::Kind::Backward, n.op->name(), 0);
        if (!device_.meta())
          n.op->backward({{device_, in, out, &params, n.params, n.key, workspace.data<float>()}, dout, din, &grads});
        else
          for (int id : n.params) grads.data(id);  // what a backward writes, it writes in a meta run too
        device_.make_progress();
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
  with_element(sum.dtype(), [&]<class T>(Element<T>) {
    device_.add(Stream::Compute, total.fresh<T>(), sum.data<T>(), part.data<T>(), sum.numel());
  });
  sum = std::move(total);
}

}  // namespace regather
