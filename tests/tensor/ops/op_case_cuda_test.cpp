// What every operation has to do on CUDA, in fp32 and in bf16: the CPU's numbers within a bound, and the same bits
// again, whatever the addresses, when rerun, and with other tensors frozen.
#include <algorithm>
#include <cmath>

#include "tensor/cuda/device.h"
#include "tests/cuda_emu/machine.h"
#include "tests/tensor/ops/op_case.h"

namespace regather::testing {
namespace {

constexpr std::int64_t kStagingBytes = 64 << 10;

class OnCuda {
 public:
  explicit OnCuda(cuda_emu::ThreadOrder order = cuda_emu::ThreadOrder::Forward)
      : machine_({.devices = 1, .order = order, .blocks_apart = 1, .guarded = false}) {}
  Result run(const OpCase& c, const Setup& setup = {}) {
    CudaDevice device(0, 0, kStagingBytes);
    return testing::run(c, device, setup);
  }
  std::vector<float> evaluate(const OpCase& c) {
    CudaDevice device(0, 0, kStagingBytes);
    return testing::evaluate(c, device);
  }
  ~OnCuda() { EXPECT_EQ(machine_.findings(), std::vector<std::string>{}); }

 private:
  cuda_emu::Machine machine_;
};

void expect_near(const std::vector<float>& cuda, const std::vector<float>& cpu, double tolerance, double base,
                 const std::string& what) {
  ASSERT_EQ(cuda.size(), cpu.size()) << what;
  double scale = 1.0;
  for (float x : cpu) scale = std::max(scale, std::abs(static_cast<double>(x) - base));
  for (std::size_t i = 0; i < cpu.size(); ++i)
    ASSERT_NEAR(cuda[i], cpu[i], tolerance * scale) << what << ", element " << i;
}

// Tolerances of the output, of gradients of inputs and of parameters.
struct Tolerances {
  double y, din, dparam;
};
void expect_near(const Result& cuda, const Result& cpu, const Tolerances& tolerance) {
  expect_near(cuda.y, cpu.y, tolerance.y, 0, "output");
  ASSERT_EQ(cuda.din.size(), cpu.din.size());
  for (std::size_t i = 0; i < cpu.din.size(); ++i)
    expect_near(cuda.din[i], cpu.din[i], tolerance.din, 0, "gradient of input " + std::to_string(i));
  for (std::size_t k = 0; k < cpu.dparam.size(); ++k)
    expect_near(cuda.dparam[k], cpu.dparam[k], tolerance.dparam, kGradientBase,
                "gradient of parameter " + std::to_string(k));
}

TEST_P(OpCases, cuda_equals_the_cpu) {
  const OpCase& c = GetParam();
  OnCuda cuda;
  expect_near(cuda.run(c), run(c), {c.tolerance, c.tolerance, c.tolerance});
  expect_near(cuda.evaluate(c), evaluate(c), c.tolerance, 0, "evaluation");
}

// A unit in the last place for each rounding: of what the CPU rounds, and of factors of products, which are rounded on
// CUDA alone (probabilities, their gradients, and those of logits).
TEST_P(OpCases, cuda_equals_the_cpu_in_bf16) {
  const OpCase& c = GetParam();
  constexpr double kUnit = 1.0 / 128;
  expect_near(OnCuda().run(c, {.values = Values::Bf16}), run(c, {.values = Values::Bf16}),
              {c.roundings * kUnit, c.gradient_roundings * kUnit, kUnit / 2});
}

TEST_P(OpCases, cuda_gives_the_same_bits_in_bf16_again_and_when_rerun) {
  const OpCase& c = GetParam();
  const Result first = OnCuda().run(c, {.values = Values::Bf16});
  EXPECT_TRUE(first == OnCuda(cuda_emu::ThreadOrder::Random).run(c, {.plan = drop_all(), .values = Values::Bf16}))
      << "with everything dropped and rerun, its threads in another order";
}

TEST_P(OpCases, cuda_gives_the_same_bits_in_bf16_wherever_its_memory_is) {
  const OpCase& c = GetParam();
  const Result first = OnCuda().run(c, {.values = Values::Bf16});
  for (int offset : {1, 3})
    EXPECT_TRUE(first == OnCuda().run(c, {.param_offset = offset, .gradient_offset = offset, .values = Values::Bf16}))
        << "parameters " << offset << " elements off";
}

TEST_P(OpCases, cuda_gives_the_same_bits_again_and_when_rerun) {
  const OpCase& c = GetParam();
  const Result first = OnCuda().run(c);
  EXPECT_TRUE(first == OnCuda(cuda_emu::ThreadOrder::Random).run(c)) << "with its threads in another order";
  EXPECT_TRUE(first == OnCuda(cuda_emu::ThreadOrder::Reverse).run(c, {.plan = drop_all()}))
      << "with everything dropped and rerun";
}

TEST_P(OpCases, cuda_gives_the_same_bits_wherever_its_memory_is) {
  const OpCase& c = GetParam();
  OnCuda cuda;
  const Result aligned = cuda.run(c);
  for (int offset : {1, 2, 3})
    EXPECT_TRUE(aligned == cuda.run(c, {.param_offset = offset, .gradient_offset = 5 - offset}))
        << "parameters " << offset << " floats off";
}

TEST_P(OpCases, cuda_gives_the_same_gradients_when_others_are_not_wanted) {
  const OpCase& c = GetParam();
  OnCuda cuda;
  const Result all = cuda.run(c);
  for (std::size_t i = 0; i < c.inputs.size(); ++i)
    if (c.inputs[i].dtype == DType::F32 && c.inputs[i].differentiable) {
      const Result some = cuda.run(c, {.fixed_inputs = Set{1} << i});
      EXPECT_TRUE(some.din[i].empty());
      for (std::size_t k = 0; k < c.params.size(); ++k) EXPECT_TRUE(same_bits(some.dparam[k], all.dparam[k]));
    }
  for (std::size_t k = 0; k < c.params.size(); ++k) {
    const Result some = cuda.run(c, {.frozen_params = Set{1} << k});
    EXPECT_TRUE(some.dparam[k].empty());
    for (std::size_t i = 0; i < c.inputs.size(); ++i) EXPECT_TRUE(same_bits(some.din[i], all.din[i]));
  }
}

}  // namespace
}  // namespace regather::testing
