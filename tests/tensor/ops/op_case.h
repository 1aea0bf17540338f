// One description of an operation gives all its tests: equal to a plain reference in double, gradients equal to finite
// differences of that reference, the same bits when run again, rerun, run in differently aligned memory or by more
// threads, the same gradients when others are frozen. A file instantiates OpCases with its cases; op_case_test.cpp
// holds the tests for a CPU, op_case_cuda_test.cpp those for CUDA.
#pragma once
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tensor/block.h"

namespace regather::testing {

using Doubles = std::vector<double>;

struct Input {
  Shape shape;
  DType dtype = DType::F32;
  int low = 0, high = 0;       // int32: drawn from [low, high)
  bool differentiable = true;  // fp32 only
};

struct OpCase {
  std::string name;
  std::vector<Input> inputs;
  std::vector<Shape> params;
  std::function<Tensor(Run&, const Activations&)> apply{};
  // The first output, from inputs (int32 ones as they are, in double) and parameters.
  std::function<Doubles(const std::vector<Doubles>& in, const std::vector<Doubles>& params)> reference{};
  double tolerance = 1e-5;       // relative to the largest element of the tensor
  bool splits_products = false;  // the library splits a sum this long over its threads, and so orders it differently
  int roundings = 1, gradient_roundings = 1;  // in bf16: of an element of the output, of an input's gradient
  int coordinates = 60;  // of each tensor that are differentiated alone; and two directions through all of them
};
inline void PrintTo(const OpCase& c, std::ostream* to) { *to << c.name; }

// What the operation under test is keyed by (it is the first one of its run).
inline constexpr RngKey kTestKey{.seed = 7, .step = 3, .sequence = 5, .block = 2, .op = 0};

// Rounded: fp32 numbers that are bf16 numbers, too. Bf16: the same numbers in bf16.
enum class Values { Any, Rounded, Bf16 };
struct Setup {
  Set frozen_params = 0, fixed_inputs = 0;    // bit k: no gradient wanted
  int param_offset = 0, gradient_offset = 0;  // elements
  std::int64_t shift_bytes = 0;               // another buffer of this size comes first
  SavePlan plan = keep_all();
  Values values = Values::Any;  // of inputs (but int32), parameters and the output's gradient
};
struct Result {
  std::vector<float> y;
  std::vector<std::vector<float>> din, dparam;  // empty where none is wanted
  std::int64_t peak_workspace = 0, peak_activations = 0;
  bool operator==(const Result& other) const;  // bitwise, of the numbers
};
// Forward and backward in memory that was full of NaNs; parameter gradients begin at kGradientBase.
inline constexpr float kGradientBase = 1.0F;
Result run(const OpCase& c, Device& device, const Setup& setup = {});
Result run(const OpCase& c, const Setup& setup = {});          // on a CPU
std::vector<float> evaluate(const OpCase& c, Device& device);  // without a tape
std::vector<float> evaluate(const OpCase& c);

bool same_bits(const std::vector<float>& a, const std::vector<float>& b);
double largest(const Doubles& x);        // magnitude
Doubles output_gradient(std::size_t n);  // what run() begins backward with

// The values that run() uses.
std::vector<Doubles> values_of_inputs(const OpCase& c);
std::vector<Doubles> values_of_params(const OpCase& c);

class OpCases : public ::testing::TestWithParam<OpCase> {};
inline std::string case_name(const ::testing::TestParamInfo<OpCase>& info) { return info.param.name; }

// f throws an error whose message has all these parts.
void expect_error(const std::function<void()>& f, const std::vector<std::string>& parts);
// The same for a case's forward.
void expect_case_error(const OpCase& c, const std::vector<std::string>& parts);

}  // namespace regather::testing
