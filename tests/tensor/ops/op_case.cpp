#include "tests/tensor/ops/op_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>

#include "tensor/ops/kernels.h"

namespace regather::testing {
namespace {

std::int64_t bytes_of(const std::vector<float>& x) { return static_cast<std::int64_t>(x.size() * sizeof(float)); }

std::vector<Bf16> rounded(const std::vector<float>& x) {
  std::vector<Bf16> y(x.size());
  kernels().round(y.data(), x.data(), static_cast<std::int64_t>(x.size()));
  return y;
}
std::vector<float> widened(const std::vector<Bf16>& x) {
  std::vector<float> y;
  for (const Bf16 v : x) y.push_back(to_float(v));
  return y;
}
std::vector<float> made_of(const Doubles& values, Values kind) {
  std::vector<float> x(values.begin(), values.end());
  return kind == Values::Any ? x : widened(rounded(x));
}

class FlatParams final : public ParamSource {
 public:
  FlatParams(Device& device, const OpCase& c, const Setup& setup) {
    dtype_ = setup.values == Values::Bf16 ? DType::BF16 : DType::F32;
    const auto values = values_of_params(c);
    std::vector<float> flat(static_cast<std::size_t>(setup.param_offset));
    for (std::size_t k = 0; k < c.params.size(); ++k) {
      table_.push_back(
          {.name = "param" + std::to_string(k), .shape = c.params[k], .trainable = !has(setup.frozen_params, k)});
      begin_.push_back(flat.size());
      const std::vector<float> made = made_of(values[k], setup.values);
      flat.insert(flat.end(), made.begin(), made.end());
    }
    flat_ = Buffer(device.memory, static_cast<std::int64_t>(flat.size() * size_of(dtype_)), Tag::Parameters);
    const auto write = [&](const auto& elements) {
      device.write(Stream::Compute, flat_.data(), elements.data(), flat_.bytes());
    };
    dtype_ == DType::BF16 ? write(rounded(flat)) : write(flat);
  }
  const std::vector<ParamInfo>& table() const override { return table_; }
  const void* data(int i) override { return flat_.data() + begin_.at(static_cast<std::size_t>(i)) * size_of(dtype_); }
  DType dtype() const override { return dtype_; }

 private:
  std::vector<ParamInfo> table_;
  std::vector<std::size_t> begin_;
  DType dtype_ = DType::F32;
  Buffer flat_;
};

Tensor make_tensor(Device& device, const Input& input, const Doubles& values, Values kind, Tag tag = Tag::Activations) {
  Tensor t(device.memory, input.shape, tag, input.dtype);
  const auto write = [&](const auto& typed) {
    device.write(Stream::Compute, t.fresh<void>(), typed.data(), t.bytes());
  };
  if (input.dtype == DType::I32)
    write(std::vector<std::int32_t>(values.begin(), values.end()));
  else if (input.dtype == DType::BF16)
    write(rounded(made_of(values, kind)));
  else
    write(made_of(values, kind));
  return t;
}
Tensor make_input(Device& device, Input input, const Doubles& values, Values kind) {
  if (kind == Values::Bf16 && input.dtype == DType::F32) input.dtype = DType::BF16;
  return make_tensor(device, input, values, kind);
}

std::vector<float> copy_of(Device& device, const float* from, std::int64_t n) {
  std::vector<float> copy(static_cast<std::size_t>(n));
  device.read(Stream::Compute, copy.data(), from, bytes_of(copy));
  return copy;
}
std::vector<float> copy_of(Device& device, const Tensor& t) {
  if (t.dtype() == DType::F32) return copy_of(device, t.data(), t.numel());
  std::vector<Bf16> copy(static_cast<std::size_t>(t.numel()));
  device.read(Stream::Compute, copy.data(), t.data<Bf16>(), t.bytes());
  return widened(copy);
}

void fill_with_nans(Device& device) {
  if (device.kind() != DeviceKind::Cpu) return;  // the emulator does it
  const Buffer junk(device.memory, std::int64_t{1} << 22, Tag::Host);
  std::fill_n(junk.data<float>(), junk.bytes() / 4, std::numeric_limits<float>::quiet_NaN());
}

}  // namespace

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
  return run(c, device, setup);
}

Result run(const OpCase& c, Device& device, const Setup& setup) {
  fill_with_nans(device);
  const Buffer shift(device.memory, setup.shift_bytes, Tag::Host);
  FlatParams params(device, c, setup);
  const ParamView view(params);
  std::vector<std::int64_t> offsets;
  std::int64_t elements = setup.gradient_offset;
  for (std::size_t k = 0; k < c.params.size(); ++k) {
    offsets.push_back(has(setup.frozen_params, k) ? -1 : elements);
    if (!has(setup.frozen_params, k)) elements += c.params[k].numel();
  }
  UnitGradients flat_gradients(device, offsets, elements, Tag::Gradients);
  const std::vector<float> base(static_cast<std::size_t>(elements), kGradientBase);
  device.write(Stream::Compute, flat_gradients.flat(), base.data(), bytes_of(base));
  Gradients gradients;
  gradients.append(flat_gradients, static_cast<int>(c.params.size()));

  Result result;
  Tape tape(device, setup.plan, kTestKey);
  {
    Activations in;
    const auto values = values_of_inputs(c);
    for (std::size_t i = 0; i < c.inputs.size(); ++i) {
      const bool wants = c.inputs[i].dtype == DType::F32 && c.inputs[i].differentiable && !has(setup.fixed_inputs, i);
      in.push_back(tape.input(make_input(device, c.inputs[i], values[i], setup.values), wants));
    }
    device.memory.restart_peaks();
    regather::Run r{device, view, &tape, kTestKey};
    Tensor y = c.apply(r, in);
    tape.outputs({y});
    in.clear();
    Tensor dy = make_tensor(device, {y.shape(), y.dtype()}, output_gradient(static_cast<std::size_t>(y.numel())),
                            setup.values, Tag::Workspace);
    Activations dx = tape.backward(view, {dy}, gradients);
    result.y = copy_of(device, y);
    for (const Tensor& d : dx) result.din.push_back(d ? copy_of(device, d) : std::vector<float>{});
  }
  for (std::size_t k = 0; k < c.params.size(); ++k) {
    result.dparam.push_back(offsets[k] < 0 ? std::vector<float>{}
                                           : copy_of(device, flat_gradients.flat() + offsets[k], c.params[k].numel()));
  }
  result.peak_workspace = device.memory.peak(Tag::Workspace);
  result.peak_activations = device.memory.peak(Tag::Activations);
  return result;
}

std::vector<float> evaluate(const OpCase& c) {
  CpuDevice device;
  return evaluate(c, device);
}

std::vector<float> evaluate(const OpCase& c, Device& device) {
  fill_with_nans(device);
  FlatParams params(device, c, {});
  const ParamView view(params);
  Activations in;
  const auto values = values_of_inputs(c);
  for (std::size_t i = 0; i < c.inputs.size(); ++i)
    in.push_back(make_input(device, c.inputs[i], values[i], Values::Any));
  regather::Run r{device, view, nullptr, kTestKey};
  return copy_of(device, c.apply(r, in));
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

}  // namespace regather::testing
