// check_gradients finds what is wrong with an operation and names it, and has nothing to say of those that are right.
#include "tensor/check_gradients.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tensor/ops/attention.h"
#include "tensor/ops/linear_cross_entropy.h"
#include "tensor/ops/rope.h"
#include "tensor/ops/swiglu.h"
#include "tests/tensor/toy_block.h"

namespace regather::toy {
namespace {

void expect_says(const GradientCheck& check, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(check.disagreement.find(part), std::string::npos)
        << "\"" << check.disagreement << "\" does not say \"" << part << "\"";
}

const std::vector<CheckedInput> kToyInputs = {{Shape{6, 8}}, {.shape = Shape{6, 1}, .values = {0, 0, 0, 1, 1, 1}}};

class DifferentiableInX : public ToyBlock {  // the documents are not
 public:
  using ToyBlock::ToyBlock;
};

TEST(CheckGradients, ABlockOfRightOperationsIsRight) {
  for (const bool frozen : {false, true})
    for (const float dropout : {0.0F, 0.3F}) {
      const GradientCheck check =
          check_gradients(DifferentiableInX(dropout), kToyInputs, toy_block_params("", 8, 12, frozen));
      EXPECT_EQ(check.disagreement, "") << frozen << " " << dropout;
      EXPECT_EQ(check.operations, dropout > 0 ? 12 : 10);
      EXPECT_LT(check.largest_error, 2e-3);
    }
}

TEST(CheckGradients, EveryOperationOfTheLibraryIsRightInABlock) {
  class Everything final : public Block {
   public:
    Activations forward(regather::Run& run, const Activations& in) const override {
      Tensor h = rope(run, in[0], 4, 2, 100.0F);
      h = regather::attention(run, std::move(h), 4, 2, 0.1F);
      Tensor gate = h;
      h = swiglu(run, std::move(gate), std::move(h));
      h = linear_cross_entropy(run, std::move(h), in[1], 0);
      return {std::move(h)};
    }
  };
  const GradientCheck check = check_gradients(
      Everything(), {{Shape{2, 5, 32}}, {.shape = Shape{2, 5}, .dtype = DType::I32, .low = -1, .high = 11}},
      {{.name = "head", .shape = {11, 16}, .init = normal(0.2F)}});
  EXPECT_EQ(check.disagreement, "");
  EXPECT_EQ(check.operations, 4);
}

// y = x^2, with one thing wrong at a time.
struct Square : Op {
  std::string_view name() const override { return "square"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape>) const override {
    return {in[0]};
  }
  Saved saved(const Needs&) const override { return {.inputs = 1}; }
  void forward(const Call& k) const override {
    for (std::int64_t i = 0; i < k.in[0].numel(); ++i) k.out[0].fresh()[i] = k.in[0].data()[i] * k.in[0].data()[i];
  }
  void backward(const BackwardCall& k) const override { times(k, 2); }
  static void times(const BackwardCall& k, float factor) {
    for (std::int64_t i = 0; i < k.in[0].numel(); ++i)
      k.din[0].fresh()[i] = factor * k.in[0].data()[i] * k.dout[0].data()[i];
  }
};

template <class Wrong>
GradientCheck check_one(std::vector<ParamInfo> params = {}) {
  return check_gradients([] { return std::make_unique<Wrong>(); }, {{Shape{3, 7}}}, params);
}

TEST(CheckGradients, ARightOperationIsRight) {
  const GradientCheck check = check_one<Square>();
  EXPECT_TRUE(check.ok()) << check.disagreement;
  EXPECT_EQ(check.operations, 1);
}

struct WrongByOnePercent final : Square {
  void backward(const BackwardCall& k) const override { times(k, 2.02F); }
};
struct WrongInOneElement final : Square {
  void backward(const BackwardCall& k) const override {
    times(k, 2);
    k.din[0].fresh()[20] += 1;
  }
};
TEST(CheckGradients, AWrongGradientIsFound) {
  expect_says(check_one<WrongByOnePercent>(), {"operation 0, square: gradient of input 0", "finite differences"});
  expect_says(
      check_gradients([] { return std::make_unique<WrongInOneElement>(); }, {{Shape{3, 7}}}, {}, {.coordinates = 1}),
      {"square: gradient of input 0", "backward says"});
}

TEST(CheckGradients, TheFirstWrongOperationOfABlockIsNamed) {
  class Mixed final : public Block {
   public:
    Activations forward(regather::Run& run, const Activations& in) const override {
      Tensor h = run.apply(std::make_unique<Square>(), {in[0]})[0];
      h = silu(run, std::move(h));
      h = run.apply(std::make_unique<WrongByOnePercent>(), {std::move(h)})[0];
      h = run.mark("mlp.act", std::move(h));
      h = run.apply(std::make_unique<WrongInOneElement>(), {std::move(h)})[0];
      return {std::move(h)};
    }
  };
  expect_says(check_gradients(Mixed(), {{Shape{3, 7}}}, {}), {"operation 2, square (mlp.act): gradient of input 0"});
}

struct Counting final : Square {
  void forward(const Call& k) const override {
    Square::forward(k);
    k.out[0].fresh()[4] += static_cast<float>(++calls_);
  }
  mutable int calls_ = 0;
};
struct CountingBackwards final : Square {
  void backward(const BackwardCall& k) const override { times(k, 2 + 1e-6F * static_cast<float>(++calls_)); }
  mutable int calls_ = 0;
};
TEST(CheckGradients, ANondeterministicOperationIsFound) {
  expect_says(check_one<Counting>(),
              {"operation 0, square: it makes other numbers when run again: output 0, element 4"});
  expect_says(check_one<CountingBackwards>(), {"gradient of input 0", "when run again"});
}

struct UnderDeclared final : Square {
  Saved saved(const Needs&) const override { return {}; }
};
struct LinearLike : Op {
  std::string_view name() const override { return "linear"; }
  std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape> params) const override {
    return right_.outputs(in, params);
  }
  Saved saved(const Needs& needs) const override { return right_.saved(needs); }
  void forward(const Call& k) const override { right_.forward(k); }
  void backward(const BackwardCall& k) const override { right_.backward(k); }
  toy::Linear right_;
};
struct UnderDeclaredWhenAlone final : LinearLike {
  Saved saved(const Needs& needs) const override { return {.inputs = needs.params == 3U ? 1U : 0U}; }
};
TEST(CheckGradients, AReadOfWhatIsNotDeclaredIsFound) {
  expect_says(check_one<UnderDeclared>(), {"operation 0, square: ", "saved() does not declare"});
  expect_says(check_one<UnderDeclaredWhenAlone>({{.name = "w", .shape = {4, 7}}, {.name = "b", .shape = {4}}}),
              {"linear: ", "saved() does not declare"});
}

struct Remembering final : Square {  // keeps its input instead of declaring it
  Saved saved(const Needs&) const override { return {}; }
  void forward(const Call& k) const override {
    x_ = {k.in[0].data(), k.in[0].data() + k.in[0].numel()};
    Square::forward(k);
  }
  void backward(const BackwardCall& k) const override {
    for (std::size_t i = 0; i < x_.size(); ++i) k.din[0].fresh()[i] = 2 * x_[i] * k.dout[0].data()[i];
  }
  mutable std::vector<float> x_;
};
TEST(CheckGradients, AnOperationThatRemembersAnExecutionIsFound) {
  expect_says(check_one<Remembering>(), {"square: gradient of input 0", "finite differences"});
}

struct PartlyWritten final : Square {
  void forward(const Call& k) const override {
    for (std::int64_t i = 1; i < k.in[0].numel(); ++i) k.out[0].fresh()[i] = k.in[0].data()[i];
  }
};
struct AddsToItsInputsGradient final : Square {
  void backward(const BackwardCall& k) const override {
    for (std::int64_t i = 0; i < k.in[0].numel(); ++i)
      k.din[0].fresh()[i] += 2 * k.in[0].data()[i] * k.dout[0].data()[i];
  }
};
struct OverwritesItsParametersGradient final : LinearLike {
  void backward(const BackwardCall& k) const override {
    if (float* db = k.dparam(1)) std::fill_n(db, k.param_shape(1).dim(0), 0.0F);
    right_.backward(k);
  }
};
struct ChangesItsInput final : Square {
  void forward(const Call& k) const override {
    Square::forward(k);
    Tensor x = k.in[0];
    x.fresh()[0] = 0;
    k.out[0].fresh()[0] = 0;
  }
};
TEST(CheckGradients, WhatIsNotWrittenOrWrittenWronglyIsFound) {
  expect_says(check_one<PartlyWritten>(), {"output 0, element 0 was not written"});
  expect_says(check_one<AddsToItsInputsGradient>(), {"gradient of input 0, element 0 was not written"});
  expect_says(check_one<OverwritesItsParametersGradient>({{.name = "w", .shape = {4, 7}}, {.name = "b", .shape = {4}}}),
              {"gradient of parameter 1", "not their sum"});
  expect_says(check_one<ChangesItsInput>(), {"changes its input 0"});
}

TEST(CheckGradients, ABlockThatComputesOutsideOfOperationsIsFound) {
  class Outside final : public Block {
   public:
    Activations forward(regather::Run& run, const Activations& in) const override {
      Tensor half(run.device.memory, in[0].shape(), Tag::Activations);
      for (std::int64_t i = 0; i < half.numel(); ++i) half.fresh()[i] = in[0].data()[i] / 2;
      return {add(run, in[0], std::move(half))};
    }
  };
  expect_says(check_gradients(Outside(), {{Shape{3, 7}}}, {}),
              {"the block: gradient of input 0", "outside of operations"});
  class Counts final : public Block {
   public:
    Activations forward(regather::Run& run, const Activations& in) const override {
      Tensor extra(run.device.memory, in[0].shape(), Tag::Activations);
      std::fill_n(extra.fresh(), extra.numel(), static_cast<float>(++calls_));
      return {add(run, in[0], std::move(extra))};
    }
    mutable int calls_ = 0;
  };
  expect_says(check_gradients(Counts(), {{Shape{3, 7}}}, {}), {"the block, run twice: output 0"});
}

struct Hinge final : Square {  // max(x, 0): not differentiable at 0
  void forward(const Call& k) const override {
    for (std::int64_t i = 0; i < k.in[0].numel(); ++i) k.out[0].fresh()[i] = std::max(k.in[0].data()[i], 0.0F);
  }
  void backward(const BackwardCall& k) const override {
    for (std::int64_t i = 0; i < k.in[0].numel(); ++i)
      k.din[0].fresh()[i] = k.in[0].data()[i] > 0 ? k.dout[0].data()[i] : 0.0F;
  }
};
TEST(CheckGradients, AKinkIsNotTakenForAWrongGradient) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const GradientCheck check =
        check_gradients([] { return std::make_unique<Hinge>(); }, {{Shape{9, 17}}}, {}, {.seed = seed});
    EXPECT_EQ(check.disagreement, "") << seed;
  }
}

TEST(CheckGradients, ErrorsOfTheBlockItselfAreThrown) {
  EXPECT_THROW(check_gradients(ToyBlock(), kToyInputs, toy_block_params("", 9, 12, false)), Error);
}

}  // namespace
}  // namespace regather::toy
