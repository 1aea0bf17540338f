// One operation as a block ran it: forward again, backward for every choice of wanted gradients, finite differences.
#include <cmath>

#include "tensor/check_gradients_parts.h"

namespace regather::gradient_check {
namespace {

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
    Buffer buffer(world_.device.memory, op_.workspace(world_.device.kind(), direction, types(), param_shapes()),
                  Tag::Workspace);
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

}  // namespace

std::string check_operation(World& world, const Seen& seen, const RngKey& key, const GradientCheckOptions& options,
                            double& largest_error) {
  return OpCheck(world, seen, key, options).run(largest_error);
}

}  // namespace regather::gradient_check
