#include "tensor/check_gradients.h"

#include <algorithm>
#include <map>

#include "tensor/check_gradients_parts.h"

namespace regather {
namespace {

using namespace gradient_check;

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
        wrong = check_operation(world_, seen, key, options_, result_.largest_error);
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
    Offloader offloader(world_.device);
    Tape tape(world_.device, plan, kKey, &offloader);
    const Activations y = record(tape, nullptr);
    tape.leave();
    if (dout_.empty())
      for (const Tensor& t : y) {
        dout_.emplace_back();
        if (t.dtype() != DType::F32) continue;  // tokens that are passed on have no gradient
        dout_.back() = Tensor(world_.device.memory, t.shape(), Tag::Workspace);
        world_.draw(dout_.back().fresh(), t.numel(), 0, 1);
      }
    std::vector<int> trainable;
    for (int i = 0; i < static_cast<int>(world_.view.size()); ++i)
      if (world_.view.info(i).trainable) trainable.push_back(i);
    ParamGradients gradients(world_, trainable, 0);
    Activations dy;
    for (const Tensor& t : dout_) dy.push_back(t ? copy(world_.device, t) : Tensor());
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
      const Whole whole = train(keep_all());
      Activations y;
      for (std::size_t k = 0; k < dout_.size(); ++k)
        y.push_back(dout_[k] ? world_.tensor(dout_[k].shape(), whole.y[k]) : Tensor());
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
      const SavePlan moved{.unmarked = Placement::Offload, .inputs = Placement::Offload};
      if (disagrees("the block, kept against offloaded", compare(kept, train(moved)))) return;
      if (disagrees("the block, kept against what policy none keeps", compare(kept, train(keep_costly())))) return;
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
