#include "tests/tensor/ops/op_case.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>

namespace regather::testing {
namespace {

class FlatParams final : public ParamSource {
 public:
  FlatParams(const OpCase& c, const Setup& setup) : offset_(static_cast<std::size_t>(setup.param_offset)) {
    const auto values = values_of_params(c);
    flat_.resize(offset_);
    for (std::size_t k = 0; k < c.params.size(); ++k) {
      table_.push_back(
          {.name = "param" + std::to_string(k), .shape = c.params[k], .trainable = !has(setup.frozen_params, k)});
      begin_.push_back(flat_.size());
      for (double v : values[k]) flat_.push_back(static_cast<float>(v));
    }
  }
  const std::vector<ParamInfo>& table() const override { return table_; }
  const void* data(int i) override { return flat_.data() + begin_.at(static_cast<std::size_t>(i)); }
  DType dtype() const override { return DType::F32; }

 private:
  std::size_t offset_;
  std::vector<ParamInfo> table_;
  std::vector<std::size_t> begin_;
  std::vector<float> flat_;
};

Tensor make_tensor(Device& device, const Input& input, const Doubles& values) {
  Tensor t(device.memory, input.shape, Tag::Activations, input.dtype);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (input.dtype == DType::I32)
      t.fresh<std::int32_t>()[i] = static_cast<std::int32_t>(values[i]);
    else
      t.fresh()[i] = static_cast<float>(values[i]);
  }
  return t;
}

std::vector<float> copy_of(const Tensor& t) { return {t.data(), t.data() + t.numel()}; }

void fill_with_nans(Device& device) {
  const Buffer junk(device.memory, std::int64_t{1} << 22, Tag::Host);
  std::fill_n(junk.data<float>(), junk.bytes() / 4, std::numeric_limits<float>::quiet_NaN());
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

Doubles output_gradient(std::size_t n) {
  std::mt19937 random(99);
  std::normal_distribution<double> normal;
  Doubles g(n);
  for (double& v : g) v = static_cast<float>(normal(random));
  return g;
}

double largest(const Doubles& x) {
  double m = 0;
  for (double v : x) m = std::max(m, std::abs(v));
  return m;
}

}  // namespace

bool Result::operator==(const Result& other) const {
  const auto same = [](const auto& a, const auto& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), same_bits);
  };
  return same_bits(y, other.y) && same(din, other.din) && same(dparam, other.dparam);
}

std::vector<Doubles> values_of_inputs(const OpCase& c) {
  std::mt19937 random(11);
  std::normal_distribution<double> normal;
  std::vector<Doubles> all;
  for (const Input& input : c.inputs) {
    Doubles values(static_cast<std::size_t>(input.shape.numel()));
    for (double& v : values)
      v = input.dtype == DType::I32 ? std::uniform_int_distribution<int>(input.low, input.high - 1)(random)
                                    : static_cast<double>(static_cast<float>(normal(random)));
    all.push_back(std::move(values));
  }
  return all;
}

std::vector<Doubles> values_of_params(const OpCase& c) {
  std::mt19937 random(22);
  std::normal_distribution<double> normal(0.1, 0.5);
  std::vector<Doubles> all;
  for (const Shape& shape : c.params) {
    Doubles values(static_cast<std::size_t>(shape.numel()));
    for (double& v : values) v = static_cast<float>(normal(random));
    all.push_back(std::move(values));
  }
  return all;
}

Result run(const OpCase& c, const Setup& setup) {
  CpuDevice device;
  fill_with_nans(device);
  const Buffer shift(device.memory, setup.shift_bytes, Tag::Host);
  FlatParams params(c, setup);
  const ParamView view(params);
  std::vector<std::int64_t> offsets;
  std::int64_t elements = setup.gradient_offset;
  for (std::size_t k = 0; k < c.params.size(); ++k) {
    offsets.push_back(has(setup.frozen_params, k) ? -1 : elements);
    if (!has(setup.frozen_params, k)) elements += c.params[k].numel();
  }
  UnitGradients flat_gradients(device, offsets, elements, Tag::Gradients);
  std::fill_n(flat_gradients.flat(), elements, kGradientBase);
  Gradients gradients;
  gradients.append(flat_gradients, static_cast<int>(c.params.size()));

  Result result;
  Tape tape(device, setup.plan, kTestKey);
  {
    Activations in;
    const auto values = values_of_inputs(c);
    for (std::size_t i = 0; i < c.inputs.size(); ++i) {
      const bool wants = c.inputs[i].dtype == DType::F32 && c.inputs[i].differentiable && !has(setup.fixed_inputs, i);
      in.push_back(tape.input(make_tensor(device, c.inputs[i], values[i]), wants));
    }
    device.memory.restart_peaks();
    regather::Run r{device, view, &tape, kTestKey};
    Tensor y = c.apply(r, in);
    tape.outputs({y});
    in.clear();
    Tensor dy(device.memory, y.shape(), Tag::Workspace);
    const Doubles g = output_gradient(static_cast<std::size_t>(y.numel()));
    for (std::size_t i = 0; i < g.size(); ++i) dy.fresh()[i] = static_cast<float>(g[i]);
    Activations dx = tape.backward(view, {dy}, gradients);
    result.y = copy_of(y);
    for (const Tensor& d : dx) result.din.push_back(d ? copy_of(d) : std::vector<float>{});
  }
  for (std::size_t k = 0; k < c.params.size(); ++k) {
    const float* begin = offsets[k] < 0 ? nullptr : flat_gradients.flat() + offsets[k];
    result.dparam.push_back(begin ? std::vector<float>(begin, begin + c.params[k].numel()) : std::vector<float>{});
  }
  result.peak_workspace = device.memory.peak(Tag::Workspace);
  result.peak_activations = device.memory.peak(Tag::Activations);
  return result;
}

std::vector<float> evaluate(const OpCase& c) {
  CpuDevice device;
  fill_with_nans(device);
  FlatParams params(c, {});
  const ParamView view(params);
  Activations in;
  const auto values = values_of_inputs(c);
  for (std::size_t i = 0; i < c.inputs.size(); ++i) in.push_back(make_tensor(device, c.inputs[i], values[i]));
  regather::Run r{device, view, nullptr, kTestKey};
  return copy_of(c.apply(r, in));
}

void expect_error(const std::function<void()>& f, const std::vector<std::string>& parts) {
  try {
    f();
  } catch (const Error& e) {
    for (const std::string& part : parts)
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos)
          << "\"" << e.what() << "\" does not say \"" << part << "\"";
    return;
  }
  FAIL() << "no error; expected one that says \"" << (parts.empty() ? "" : parts[0]) << "\"";
}

void expect_case_error(const OpCase& c, const std::vector<std::string>& parts) {
  expect_error([&] { evaluate(c); }, parts);
}

TEST_P(OpCases, equals_the_reference) {
  const OpCase& c = GetParam();
  const Doubles expected = c.reference(values_of_inputs(c), values_of_params(c));
  const double bound = c.tolerance * std::max(1.0, largest(expected));
  const std::vector<float> y = run(c).y;
  ASSERT_EQ(y.size(), expected.size());
  for (std::size_t i = 0; i < y.size(); ++i) ASSERT_NEAR(y[i], expected[i], bound) << "element " << i;
}

TEST_P(OpCases, gradients_equal_finite_differences) {
  const OpCase& c = GetParam();
  const Result result = run(c);
  const Doubles dy = output_gradient(result.y.size());
  auto in = values_of_inputs(c), params = values_of_params(c);
  const auto objective = [&] {
    const Doubles y = c.reference(in, params);
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += y[i] * dy[i];
    return sum;
  };
  constexpr double kStep = 1e-5;
  std::mt19937 random(33);
  const auto check_tensor = [&](Doubles& x, const std::vector<float>& gradient, double base, const std::string& what) {
    ASSERT_EQ(gradient.size(), x.size()) << what;
    std::vector<std::size_t> order(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    order.resize(std::min<std::size_t>(order.size(), static_cast<std::size_t>(c.coordinates)));
    double scale = 0;
    for (float g : gradient) scale = std::max(scale, std::abs(static_cast<double>(g) - base));
    const double bound = 2 * c.tolerance * std::max(scale, 0.1);
    for (std::size_t i : order) {
      const double before = x[i];
      x[i] = before + kStep;
      const double up = objective();
      x[i] = before - kStep;
      const double slope = (up - objective()) / (2 * kStep);
      x[i] = before;
      ASSERT_NEAR(static_cast<double>(gradient[i]) - base, slope, bound) << what << ", element " << i;
    }
    for (int direction = 0; direction < 2; ++direction) {
      const Doubles before = x;
      Doubles sign(x.size());
      double expected = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        sign[i] = (random() & 1U) != 0 ? 1 : -1;
        expected += sign[i] * (static_cast<double>(gradient[i]) - base);
      }
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = before[i] + kStep * sign[i];
      const double up = objective();
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = before[i] - kStep * sign[i];
      const double slope = (up - objective()) / (2 * kStep);
      x = before;
      ASSERT_NEAR(expected, slope, bound * std::sqrt(static_cast<double>(x.size()))) << what << ", all elements";
    }
  };
  for (std::size_t i = 0; i < c.inputs.size(); ++i)
    if (c.inputs[i].dtype == DType::F32 && c.inputs[i].differentiable)
      check_tensor(in[i], result.din.at(i), 0, "gradient of input " + std::to_string(i));
  for (std::size_t k = 0; k < c.params.size(); ++k)
    check_tensor(params[k], result.dparam[k], kGradientBase, "gradient of parameter " + std::to_string(k));
}

TEST_P(OpCases, gives_the_same_bits_again_and_when_rerun) {
  const OpCase& c = GetParam();
  const Result first = run(c);
  EXPECT_TRUE(first == run(c)) << "run twice";
  EXPECT_TRUE(first == run(c, {.plan = drop_all()})) << "with everything dropped and rerun";
}

TEST_P(OpCases, gives_the_same_bits_wherever_its_memory_is) {
  const OpCase& c = GetParam();
  const Result aligned = run(c);
  for (int offset : {1, 2, 3, 5, 8, 13})
    EXPECT_TRUE(aligned ==
                run(c, {.param_offset = offset, .gradient_offset = 16 - offset, .shift_bytes = 4 * offset + 4096}))
        << "parameters " << offset << " floats off";
}

TEST_P(OpCases, gives_the_same_bits_with_any_number_of_threads) {
  if (GetParam().splits_products) GTEST_SKIP() << "a product is split over threads";
  const int before = omp_get_max_threads();
  omp_set_num_threads(1);
  const Result one = run(GetParam());
  for (int threads : {2, 3}) {
    omp_set_num_threads(threads);
    EXPECT_TRUE(one == run(GetParam())) << threads << " threads";
  }
  omp_set_num_threads(before);
}

TEST_P(OpCases, gives_the_same_gradients_when_others_are_not_wanted) {
  const OpCase& c = GetParam();
  const Result all = run(c);
  Set inputs = 0;
  for (std::size_t i = 0; i < c.inputs.size(); ++i)
    if (c.inputs[i].dtype == DType::F32 && c.inputs[i].differentiable) inputs |= Set{1} << i;
  const Set params = (Set{1} << c.params.size()) - 1;
  for (Set fixed = 0; fixed <= inputs; ++fixed)
    for (Set frozen = 0; frozen <= params; ++frozen) {
      if ((fixed & ~inputs) != 0 || (fixed == inputs && frozen == params)) continue;
      const Result some = run(c, {.frozen_params = frozen, .fixed_inputs = fixed});
      EXPECT_TRUE(same_bits(some.y, all.y));
      for (std::size_t i = 0; i < c.inputs.size(); ++i) {
        if (has(inputs & ~fixed, i))
          EXPECT_TRUE(same_bits(some.din[i], all.din[i])) << "input " << i << ", frozen " << frozen;
        else
          EXPECT_TRUE(some.din[i].empty());
      }
      for (std::size_t k = 0; k < c.params.size(); ++k) {
        if (has(frozen, k))
          EXPECT_TRUE(some.dparam[k].empty());
        else
          EXPECT_TRUE(same_bits(some.dparam[k], all.dparam[k])) << "parameter " << k << ", fixed " << fixed;
      }
    }
}

}  // namespace regather::testing
