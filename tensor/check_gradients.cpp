#include "tensor/check_gradients.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "tensor/check_gradients_parts.h"

namespace regather {
namespace {

using namespace gradient_check;

struct Seen {
  const Op* op;
  Activations in, out;
  std::vector<int> params;
  Needs needs;
  Set arrives = 0;  // outputs that receive a gradient
};

// Records what a block runs, and which of it wants or receives a gradient, as the tape has it.
class Recorder final : public OpObserver {
 public:
  explicit Recorder(const ParamView& params) : params_(params) {}
  void input(const Tensor& x, bool needs_grad) { needs_[x.id] = needs_grad; }
  void recorded(const Op& op, const Activations& in, const Activations& out, std::span<const int> ids) override {
    Seen seen{&op, in, out, {ids.begin(), ids.end()}, {}};
    for (std::size_t i = 0; i < in.size(); ++i)
      if (in[i].tape != 0 && needs_[in[i].id]) seen.needs.inputs |= Set{1} << i;
    for (std::size_t k = 0; k < ids.size(); ++k)
      if (params_.info(ids[k]).trainable) seen.needs.params |= Set{1} << k;
    for (const Tensor& y : out) needs_[y.id] = seen.needs.inputs != 0 || seen.needs.params != 0;
    all.push_back(std::move(seen));
  }
  void find_flow(const Activations& outputs) {
    std::map<int, bool> arrives;
    for (const Tensor& y : outputs) arrives[y.id] = true;
    for (auto seen = all.rbegin(); seen != all.rend(); ++seen) {
      for (std::size_t k = 0; k < seen->out.size(); ++k)
        if (arrives[seen->out[k].id]) seen->arrives |= Set{1} << k;
      if (seen->arrives == 0) seen->needs = {};
      for (std::size_t i = 0; i < seen->in.size(); ++i)
        if (has(seen->needs.inputs, i)) arrives[seen->in[i].id] = true;
    }
  }
  std::vector<Seen> all;

 private:
  const ParamView& params_;
  std::map<int, bool> needs_;
};

// ---- one operation --------------------------------------------------------------------------------------------------

class OpCheck {
 public:
  OpCheck(World& world, const Seen& seen, const RngKey& key, const GradientCheckOptions& options)
      : world_(world), seen_(seen), op_(*seen.op), key_(key), options_(options) {}

  // What is wrong, or nothing.
  std::string run(double& largest_error) {
    std::vector<std::vector<char>> before;
    for (const Tensor& x : seen_.in) before.push_back(bytes_of(x));
    std::string wrong = check_forward();
    if (wrong.empty() && (seen_.needs.inputs != 0 || seen_.needs.params != 0)) {
      draw_output_gradients();
      wrong = check_backward(largest_error);
    }
    for (std::size_t i = 0; wrong.empty() && i < before.size(); ++i)
      if (bytes_of(seen_.in[i]) != before[i]) wrong = fmt::format("it changes its input {}", i);
    return wrong;
  }

 private:
  std::vector<ValueType> types() const {
    std::vector<ValueType> types;
    for (const Tensor& x : seen_.in) types.push_back({x.shape(), x.dtype()});
    return types;
  }
  std::vector<Shape> param_shapes() const {
    std::vector<Shape> shapes;
    for (int id : seen_.params) shapes.push_back(world_.view.info(id).shape);
    return shapes;
  }
  Buffer workspace(Op::Direction direction) const {
    Buffer buffer(world_.device.memory, op_.workspace(direction, types(), param_shapes()), Tag::Workspace);
    poison(buffer);
    return buffer;
  }
  Activations forward(const Activations& in) const {
    Activations out = allocate_outputs(op_, world_.device, in, world_.view, seen_.params);
    for (Tensor& y : out) poison(y);
    const Buffer scratch = workspace(Op::Direction::Forward);
    op_.forward({world_.device, in, out, &world_.view, seen_.params, key_, scratch.data<float>()});
    return out;
  }
  // Other numbers of the same shapes: what an operation remembers of them would show.
  std::string run_with_other_numbers() const {
    Activations in;
    std::vector<std::vector<char>> before;
    for (const Tensor& x : seen_.in) {
      in.push_back(copy(world_.device, x));
      float* values = x.dtype() == DType::F32 ? in.back().mutate() : nullptr;
      for (std::int64_t i = 0; values && i < x.numel(); ++i) values[i] = 0.5F * values[i] + 0.25F;
      before.push_back(bytes_of(in.back()));
    }
    forward(in);
    for (std::size_t i = 0; i < in.size(); ++i)
      if (bytes_of(in[i]) != before[i]) return fmt::format("it changes its input {}", i);
    return "";
  }

  std::string check_forward() {
    y_ = forward(seen_.in);
    if (std::string wrong = run_with_other_numbers(); !wrong.empty()) return wrong;
    const Activations again = forward(seen_.in);
    for (std::size_t k = 0; k < y_.size(); ++k) {
      if (const auto i = first_difference(y_[k], again[k]))
        return fmt::format("it makes other numbers when run again: output {}, element {}: {}, then {}", k, *i,
                           y_[k].data()[*i], again[k].data()[*i]);
      if (const auto i = first_nan(y_[k]))
        return fmt::format("output {}, element {} was not written, or is not a number", k, *i);
    }
    return "";
  }

  void draw_output_gradients() {
    for (std::size_t k = 0; k < y_.size(); ++k) {
      dout_.emplace_back();
      if (!has(seen_.arrives, k)) continue;
      dout_.back() = Tensor(world_.device.memory, y_[k].shape(), Tag::Workspace);
      world_.draw(dout_.back().fresh(), y_[k].numel(), 0, 1);
    }
  }

  // What backward makes of the values that are saved for these needs, and of no others.
  struct Result {
    std::vector<Floats> din, dparam;  // empty where none is wanted
    Activations out;
  };
  Result backward(const Needs& needs, float begin_with) const {
    const Saved saved = op_.saved(needs);
    Activations in(seen_.in.size()), out(y_.size()), din(seen_.in.size());
    Result result;
    for (std::size_t i = 0; i < in.size(); ++i)
      if (has(saved.inputs, i)) in[i] = seen_.in[i];
    for (std::size_t k = 0; k < out.size(); ++k) {
      if (op_.fused_with_backward()) {
        out[k] = Tensor(world_.device.memory, y_[k].shape(), Tag::Activations, y_[k].dtype());
        poison(out[k]);
      } else if (has(saved.outputs, k)) {
        out[k] = copy(world_.device, y_[k]);
      }
    }
    for (std::size_t i = 0; i < din.size(); ++i) {
      if (!has(needs.inputs, i)) continue;
      din[i] = op_.passes_gradient() ? dout_[0].view(seen_.in[i].shape())
                                     : Tensor(world_.device.memory, seen_.in[i].shape(), Tag::Workspace);
      if (!op_.passes_gradient()) poison(din[i]);
    }
    std::vector<int> wanted;
    for (std::size_t k = 0; k < seen_.params.size(); ++k)
      if (has(needs.params, k)) wanted.push_back(seen_.params[k]);
    ParamGradients gradients(world_, wanted, begin_with);
    const Buffer scratch = workspace(Op::Direction::Backward);
    op_.backward({{world_.device, in, out, &world_.view, seen_.params, key_, scratch.data<float>()},
                  dout_,
                  din,
                  &gradients.grads});
    for (const Tensor& d : din) result.din.push_back(d ? floats_of(d) : Floats());
    for (int id : seen_.params) result.dparam.push_back(gradients.of(id));
    result.out = std::move(out);
    return result;
  }

  std::string check_backward(double& largest_error) {
    run_with_other_numbers();
    const Result all = backward(seen_.needs, 0);
    if (std::string wrong = check_written(all); !wrong.empty()) return wrong;
    if (std::string wrong = compare("when run again", backward(seen_.needs, 0), all); !wrong.empty()) return wrong;
    if (std::string wrong = check_adds(all); !wrong.empty()) return wrong;
    if (std::string wrong = check_subsets(all); !wrong.empty()) return wrong;
    return check_differences(all, largest_error);
  }

  std::string check_written(const Result& r) const {
    for (const auto& [what, tensors] : {std::pair{"input", &r.din}, {"parameter", &r.dparam}})
      for (std::size_t i = 0; i < tensors->size(); ++i)
        for (std::size_t e = 0; e < (*tensors)[i].size(); ++e)
          if (std::isnan((*tensors)[i][e]))
            return fmt::format("gradient of {} {}, element {} was not written, or is not a number", what, i, e);
    if (!op_.fused_with_backward()) return "";
    for (std::size_t k = 0; k < y_.size(); ++k)
      for (std::int64_t e = 0; e < y_[k].numel(); ++e)
        if (const float a = r.out[k].data()[e], b = y_[k].data()[e]; !(std::abs(a - b) <= 1e-4F * (1 + std::abs(b))))
          return fmt::format("output {}, element {}: backward makes {}, forward {}", k, e, a, b);
    return "";
  }

  static std::string compare(std::string_view when, const Result& some, const Result& all) {
    for (const auto& [what, a, b] :
         {std::tuple{"input", &some.din, &all.din}, {"parameter", &some.dparam, &all.dparam}})
      for (std::size_t i = 0; i < a->size(); ++i)
        if (const auto& [x, y] = std::pair((*a)[i], (*b)[i]); !x.empty())
          if (const auto e = first_difference(x, y))
            return fmt::format("gradient of {} {}, element {}: {}, and {} {}", what, i, *e, y[*e], x[*e], when);
    return "";
  }

  std::string check_adds(const Result& all) const {
    constexpr float kBegin = 0.5F;
    const Result added = backward(seen_.needs, kBegin);
    for (std::size_t k = 0; k < all.dparam.size(); ++k)
      for (std::size_t e = 0; e < all.dparam[k].size(); ++e) {
        const float g = all.dparam[k][e], got = added.dparam[k][e];
        if (std::abs(got - (kBegin + g)) > 1e-4F * (1 + std::abs(g)))
          return fmt::format(
              "gradient of parameter {}, element {}: {} and {} of another backward are {}, not their sum", k, e, g,
              kBegin, got);
      }
    return "";
  }

  // saved() may depend on what is wanted; each gradient has to be the same whatever else is.
  std::string check_subsets(const Result& all) const {
    std::vector<std::pair<bool, std::size_t>> wanted;  // parameter?, which
    for (std::size_t i = 0; i < seen_.in.size(); ++i)
      if (has(seen_.needs.inputs, i)) wanted.emplace_back(false, i);
    for (std::size_t k = 0; k < seen_.params.size(); ++k)
      if (has(seen_.needs.params, k)) wanted.emplace_back(true, k);
    constexpr std::size_t kAllSubsets = 5;  // up to so many; of more, each alone and all but each
    const auto needs_of = [&](std::uint64_t subset) {
      Needs needs;
      for (std::size_t w = 0; w < wanted.size(); ++w)
        if ((subset >> w & 1U) != 0) (wanted[w].first ? needs.params : needs.inputs) |= Set{1} << wanted[w].second;
      return needs;
    };
    const std::uint64_t whole = (std::uint64_t{1} << wanted.size()) - 1;
    std::vector<std::uint64_t> subsets;
    if (wanted.size() <= kAllSubsets)
      for (std::uint64_t s = 1; s < whole; ++s) subsets.push_back(s);
    for (std::size_t w = 0; wanted.size() > kAllSubsets && w < wanted.size(); ++w)
      subsets.insert(subsets.end(), {std::uint64_t{1} << w, whole & ~(std::uint64_t{1} << w)});
    for (const std::uint64_t s : subsets)
      if (std::string wrong = compare("when other gradients are not wanted", backward(needs_of(s), 0), all);
          !wrong.empty())
        return wrong;
    return "";
  }

  std::string check_differences(const Result& all, double& largest_error) {
    Activations in = seen_.in;
    const std::function<Activations()> evaluate = [&] { return forward(in); };
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (!has(seen_.needs.inputs, i)) continue;
      in[i] = copy(world_.device, seen_.in[i]);
      const Differences d{world_, options_, dout_, evaluate};
      if (std::string wrong = d.check({in[i].mutate(), all.din[i]}, largest_error); !wrong.empty())
        return fmt::format("gradient of input {}, {}", i, wrong);
      in[i] = seen_.in[i];
    }
    for (std::size_t k = 0; k < seen_.params.size(); ++k) {
      if (!has(seen_.needs.params, k)) continue;
      const Differences d{world_, options_, dout_, evaluate};
      if (std::string wrong = d.check({world_.values(seen_.params[k]), all.dparam[k]}, largest_error); !wrong.empty())
        return fmt::format("gradient of parameter {} ({}), {}", k, world_.view.info(seen_.params[k]).name, wrong);
    }
    return "";
  }

  World& world_;
  const Seen& seen_;
  const Op& op_;
  RngKey key_;
  const GradientCheckOptions& options_;
  Activations y_, dout_;
};

// ---- the whole block ------------------------------------------------------------------------------------------------

class BlockCheck {
 public:
  BlockCheck(const Block& block, const std::vector<CheckedInput>& inputs, const std::vector<ParamInfo>& params,
             const GradientCheckOptions& options)
      : block_(block), options_(options), world_(params, options.seed) {
    for (const CheckedInput& input : inputs) in_.push_back(world_.make(input));
  }

  GradientCheck run() {
    check_operations();
    if (result_.ok()) check_whole();
    return result_;
  }

 private:
  static constexpr RngKey kKey{.seed = 11, .step = 2, .sequence = 3, .block = 4, .op = 0};

  bool differentiable(std::size_t i) const { return in_[i].dtype() == DType::F32 && block_.differentiable(i); }
  Activations record(Tape& tape, Recorder* recorder) {
    Activations x;
    for (std::size_t i = 0; i < in_.size(); ++i) {
      x.push_back(tape.input(in_[i], differentiable(i)));
      if (recorder) recorder->input(x.back(), differentiable(i));
    }
    Run run{world_.device, world_.view, &tape, kKey, recorder};
    Activations y = block_.forward(run, x);
    tape.outputs(y);
    return y;
  }

  void check_operations() {
    Tape tape(world_.device, keep_all(), kKey);
    Recorder recorder(world_.view);
    const Activations y = record(tape, &recorder);
    recorder.find_flow(y);
    const std::vector<Tape::ValueReport> values = tape.report();
    for (std::size_t n = 0; n < recorder.all.size() && result_.ok(); ++n) {
      const Seen& seen = recorder.all[n];
      fused_ = fused_ || seen.op->fused_with_backward();
      RngKey key = kKey;
      key.op = n;
      ++result_.operations;
      std::string wrong;
      try {
        wrong = OpCheck(world_, seen, key, options_).run(result_.largest_error);
      } catch (const Error& e) {
        wrong = e.what();
      }
      if (wrong.empty()) continue;
      std::string label(seen.op->name());
      for (const Tensor& out : seen.out)
        if (const std::string& name = values.at(static_cast<std::size_t>(out.id)).name; !name.starts_with(label + "."))
          label += fmt::format(" ({})", name);
      result_.disagreement = fmt::format("operation {}, {}: {}", n, label, wrong);
    }
  }

  struct Whole {
    std::vector<Floats> y, din, dparam;
  };
  Whole train(const SavePlan& plan) {
    Whole whole;
    Tape tape(world_.device, plan, kKey);
    const Activations y = record(tape, nullptr);
    if (dout_.empty())
      for (const Tensor& t : y) {
        dout_.emplace_back(world_.device.memory, t.shape(), Tag::Workspace);
        world_.draw(dout_.back().fresh(), t.numel(), 0, 1);
      }
    std::vector<int> trainable;
    for (int i = 0; i < static_cast<int>(world_.view.size()); ++i)
      if (world_.view.info(i).trainable) trainable.push_back(i);
    ParamGradients gradients(world_, trainable, 0);
    Activations dy;
    for (const Tensor& t : dout_) dy.push_back(copy(world_.device, t));
    const Activations dx = tape.backward(world_.view, std::move(dy), gradients.grads);
    for (std::size_t i = 0; i < dx.size(); ++i)
      whole.din.push_back(dx[i] && differentiable(i) ? floats_of(dx[i]) : Floats());
    for (int i = 0; i < static_cast<int>(world_.view.size()); ++i) whole.dparam.push_back(gradients.of(i));
    for (const Tensor& t : y) whole.y.push_back(floats_of(t));
    return whole;
  }
  // With a tape: without one, nothing is dropped at random. Losses are computed in backward.
  Activations evaluate() {
    if (fused_) {
      Activations y;
      for (const Floats& values : train(keep_all()).y) y.push_back(world_.tensor(dout_[y.size()].shape(), values));
      return y;
    }
    Tape tape(world_.device, drop_all(), kKey);
    return record(tape, nullptr);
  }

  static std::string compare(const Whole& a, const Whole& b) {
    for (const auto& [what, x, y] : {std::tuple{"output", &a.y, &b.y},
                                     {"gradient of input", &a.din, &b.din},
                                     {"gradient of parameter", &a.dparam, &b.dparam}})
      for (std::size_t i = 0; i < x->size(); ++i)
        if (const auto e = first_difference((*x)[i], (*y)[i]))
          return fmt::format("{} {}, element {}: {} and {}", what, i, *e, (*x)[i][*e], (*y)[i][*e]);
    return "";
  }

  void check_whole() {
    const auto disagrees = [&](std::string_view where, const std::string& wrong) {
      if (result_.ok() && !wrong.empty())
        result_.disagreement = fmt::format(
            "{}: {}; every operation alone is right: what does this is outside of operations", where, wrong);
      return !result_.ok();
    };
    try {
      const Whole kept = train(keep_all());
      if (disagrees("the block, run twice", compare(kept, train(keep_all())))) return;
      for (const Order order : {Order::Lazy, Order::Ahead, Order::Eager}) {
        SavePlan plan = drop_all();
        plan.order = order;
        plan.verify = true;
        if (disagrees("the block, kept against recomputed", compare(kept, train(plan)))) return;
      }
      disagrees("the block", check_differences(kept));
    } catch (const Error& e) {
      disagrees("the block", e.what());
    }
  }

  std::string check_differences(const Whole& whole) {
    GradientCheckOptions options = options_;
    options.coordinates /= 4;  // each operation's have been looked at one by one
    double largest = 0, ignored = 0;
    for (const auto* all : {&whole.din, &whole.dparam})
      for (const Floats& tensor : *all) largest = std::max(largest, largest_of(tensor));
    const Differences d{world_, options, dout_, [this] { return evaluate(); }, 0.01 * largest};
    for (std::size_t i = 0; i < in_.size(); ++i) {
      if (whole.din[i].empty()) continue;
      const Tensor before = in_[i];
      in_[i] = copy(world_.device, before);
      Floats values = floats_of(before);
      // A tape's input may not change while it is held: every evaluation gets a copy of its own.
      const Differences of_input{world_, options, dout_,
                                 [&] {
                                   in_[i] = world_.tensor(before.shape(), values);
                                   return evaluate();
                                 },
                                 d.floor};
      const std::string wrong = of_input.check({values.data(), whole.din[i]}, ignored);
      in_[i] = before;
      if (!wrong.empty()) return fmt::format("gradient of input {}, {}", i, wrong);
    }
    for (std::size_t k = 0; k < whole.dparam.size(); ++k)
      if (!whole.dparam[k].empty())
        if (std::string wrong = d.check({world_.values(static_cast<int>(k)), whole.dparam[k]}, ignored); !wrong.empty())
          return fmt::format("gradient of parameter {} ({}), {}", k, world_.view.info(static_cast<int>(k)).name, wrong);
    return "";
  }

  const Block& block_;
  GradientCheckOptions options_;
  World world_;
  Activations in_, dout_;
  bool fused_ = false;
  GradientCheck result_;
};

class OneOperation final : public Block {
 public:
  OneOperation(const MakeOp& make, const std::vector<CheckedInput>& inputs) : make_(make), inputs_(inputs) {}
  Activations forward(Run& run, const Activations& in) const override {
    std::vector<int> ids;
    for (std::size_t k = 0; k < run.params.size(); ++k) ids.push_back(static_cast<int>(k));
    Activations y = run.apply(make_(), in, std::move(ids));
    y.resize(1);
    return y;
  }
  bool differentiable(std::size_t i) const override { return inputs_.at(i).differentiable; }

 private:
  const MakeOp& make_;
  const std::vector<CheckedInput>& inputs_;
};

}  // namespace

GradientCheck check_gradients(const Block& block, const std::vector<CheckedInput>& inputs,
                              const std::vector<ParamInfo>& params, const GradientCheckOptions& options) {
  return BlockCheck(block, inputs, params, options).run();
}

GradientCheck check_gradients(const MakeOp& make, const std::vector<CheckedInput>& inputs,
                              const std::vector<ParamInfo>& params, const GradientCheckOptions& options) {
  return check_gradients(OneOperation(make, inputs), inputs, params, options);
}

}  // namespace regather
