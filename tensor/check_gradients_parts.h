// What check_gradients() is made of: parameters and inputs with random values, gradients of some of them, memory that
// shows what was not written, and finite differences. Not for programs.
#pragma once
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tensor/check_gradients.h"

namespace regather::gradient_check {

using Floats = std::vector<float>;

// A device, the parameters' values, and a source of random numbers.
class World {
 public:
  World(const std::vector<ParamInfo>& params, std::uint64_t seed);
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  Tensor make(const CheckedInput& input);
  Tensor tensor(const Shape& shape, const Floats& values);
  void draw(float* out, std::int64_t n, float mean, float deviation);
  float* values(int param) { return source_.values.at(static_cast<std::size_t>(param)).data(); }

  CpuDevice device;
  std::mt19937_64 random;
  ParamView view;

 private:
  struct Source final : ParamSource {
    const std::vector<ParamInfo>& table() const override { return infos; }
    const void* data(int i) override { return values.at(static_cast<std::size_t>(i)).data(); }
    DType dtype() const override { return DType::F32; }
    std::vector<ParamInfo> infos;
    std::vector<Floats> values;
  };
  Source source_;
};

// Gradients of the wanted parameters, beginning with a number; the others are frozen.
class ParamGradients {
 public:
  ParamGradients(World& world, const std::vector<int>& wanted, float begin_with);
  Floats of(int param) const;  // empty if it is not wanted
  Gradients grads;

 private:
  const ParamView& view_;
  std::vector<std::int64_t> offsets_;
  std::optional<UnitGradients> unit_;
};

void poison(const Buffer& buffer);  // every fp32 value is not a number
void poison(Tensor& t);
Tensor copy(Device& device, const Tensor& t);
std::vector<char> bytes_of(const Tensor& t);
Floats floats_of(const Tensor& t);
std::optional<std::size_t> first_difference(const Floats& a, const Floats& b);  // of bits
std::optional<std::size_t> first_difference(const Tensor& a, const Tensor& b);
std::optional<std::size_t> first_nan(const Tensor& t);
double largest_of(const Floats& values);

// Compares gradients with central differences of sum(dy y), at two steps: how far these are apart says how well they
// are known (a kink, rounding), and so much is allowed besides the tolerance.
struct Differences {
  World& world;
  const GradientCheckOptions& options;
  const Activations& dy;                  // undefined where no gradient arrives
  std::function<Activations()> evaluate;  // y, for the variable's values of the moment
  double floor = 0;                       // what a gradient's elements are measured against, at least

  struct Variable {
    float* values;
    const Floats& gradient;
  };
  // What differs ("element 3: ..."), or nothing.
  std::string check(const Variable& v, double& largest_error) const;

 private:
  struct Slope {
    double backward, differences, slack;
  };
  using Direction = std::vector<std::pair<std::size_t, float>>;
  Slope along(const Variable& v, const Direction& direction, double step, const Activations& y0) const;
};

// An operation as a block ran it.
struct Seen {
  const Op* op;
  Activations in, out;
  std::vector<int> params;
  Needs needs;
  Set arrives = 0;  // outputs that receive a gradient
};

// What is wrong with it ("gradient of input 0, ..."), or nothing.
std::string check_operation(World& world, const Seen& seen, const RngKey& key, const GradientCheckOptions& options,
                            double& largest_error);

}  // namespace regather::gradient_check
