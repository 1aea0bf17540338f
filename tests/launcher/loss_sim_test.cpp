// The loss is one sum over all counted tokens of the step, divided by their number: whoever holds them.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/launcher/faulty_block.h"
#include "tests/launcher/training_run.h"

namespace regather::testing {
namespace {

// Sequences of very different weight: the i-th of the step has so many counted tokens.
RunSetup uneven(int world, std::int64_t micro_batch, int micro_batches) {
  static constexpr std::int64_t kCounted[] = {16, 1, 5, 0, 16, 3, 0, 0};
  RunSetup s;
  s.world = world;
  s.micro_batch = micro_batch;
  s.plan.micro_batches = micro_batches;
  s.counted = [](std::uint64_t sequence, std::int64_t t) { return t < kCounted[sequence % 8]; };
  s.optimizer.type = OptimizerOptions::Type::Sgd;
  s.steps = 3;
  return s;
}

void expect_same_training(const RunResult& a, const RunResult& b) {
  for (std::size_t i = 0; i < a.losses.size(); ++i) {
    EXPECT_NEAR(a.losses[i], b.losses[i], 1e-5 * b.losses[i]);
    EXPECT_NEAR(a.norms[i], b.norms[i], 1e-5 * b.norms[i]);
  }
  for (const auto& [name, values] : b.gradients) {
    float largest = 0, difference = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      largest = std::max(largest, std::abs(values[i]));
      difference = std::max(difference, std::abs(values[i] - a.gradients.at(name)[i]));
    }
    EXPECT_LE(difference, 1e-5F * largest + 1e-6F * static_cast<float>(b.norms.back())) << name;
  }
}

TEST(Loss, TokensWeighTheSameOnAnyRankAndInAnyMicroBatch) {
  const RunResult joined = train(uneven(1, 8, 1));
  expect_same_training(train(uneven(1, 1, 8)), joined);
  expect_same_training(train(uneven(2, 4, 1)), joined);
  expect_same_training(train(uneven(2, 1, 4)), joined);
  expect_same_training(train(uneven(4, 2, 1)), joined);  // the last rank has no token at all
  RunSetup layer_major = uneven(2, 2, 2);
  layer_major.plan.order = AccumulationOrder::LayerMajor;
  expect_same_training(train(layer_major), joined);
}

TEST(Loss, DoesNotGrowWithTheNumberOfMicroBatches) {
  RunSetup s;
  s.steps = 1;
  s.micro_batch = 8;
  const double whole = train(s).losses[0];
  for (const int micro : {2, 4, 8}) {
    s.micro_batch = 8 / micro;
    s.plan.micro_batches = micro;
    EXPECT_NEAR(train(s).losses[0], whole, 1e-5 * whole) << micro;
  }
}

TEST(Loss, AStepWithoutTokensChangesNothing) {
  RunSetup s;
  s.counted = [](std::uint64_t, std::int64_t) { return false; };
  const RunResult r = train(s);
  EXPECT_EQ(r.skipped, (std::vector<bool>{true, true}));
  s.steps = 1;
  EXPECT_TRUE(train(s).parameters == r.parameters);
}

TEST(Loss, TheNormStaysWhenNothingIsLearned) {
  for (const auto reduce : {ReduceWhen::EachMicroBatch, ReduceWhen::Once})
    for (const Strategy strategy : {Strategy::Full, Strategy::Gradients, Strategy::Optimizer, Strategy::None}) {
      RunSetup s;
      s.lr = 0;
      s.steps = 5;
      s.same_batch = true;
      s.plan.micro_batches = 4;
      s.micro_batch = 1;
      s.plan.reduce = reduce;
      s.strategy = strategy;
      const RunResult r = train(s);
      for (double norm : r.norms) EXPECT_EQ(norm, r.norms[0]);
      for (double loss : r.losses) EXPECT_EQ(loss, r.losses[0]);
    }
}

TEST(Loss, TheKeyBiasHasNoGradientButRounding) {
  const RunResult r = train(RunSetup{});
  const auto& bias = r.gradients.at("h.0.attn.c_attn.bias");
  for (std::size_t i = 32; i < 64; ++i) EXPECT_LE(std::abs(bias[i]), 1e-6 * r.norms.back());
}

RunSetup with_fault(int faulty_rank, std::uint64_t faulty_step, std::function<void(float*)> fault) {
  RunSetup s;
  s.world = 3;
  s.make = [=](const RunSetup& setup, int rank) {
    Model model = make_model(setup.model);
    put_fault(model, 1, [=](std::uint64_t step, float* values, std::int64_t) {
      if (rank == faulty_rank && step == faulty_step) fault(values);
    });
    return model;
  };
  return s;
}

TEST(Nonfinite, OneRanksNanEndsAllRanksNamingTheStep) {
  for (int rank = 0; rank < 3; ++rank) {
    RunSetup s = with_fault(rank, 1, [](float* values) { values[3] = -std::nanf(""); });
    try {
      train(s);
      FAIL() << "no error";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("step 2: the loss is nan and the gradient's norm is nan;"),
                std::string::npos)
          << e.what();
      EXPECT_EQ(e.code(), ExitCode::Failed);
    }
  }
}

TEST(Nonfinite, SkippingIsDecidedByAllRanksTogether) {
  for (int rank = 0; rank < 3; ++rank) {
    RunSetup s = with_fault(rank, 1, [](float* values) { values[0] = INFINITY; });
    s.nonfinite = TrainerOptions::Nonfinite::Skip;
    if (rank == 1) s.policy.offload.names = {"all"};
    s.steps = 2;
    const RunResult skipped = train(s);
    EXPECT_EQ(skipped.skipped, (std::vector<bool>{false, true}));
    RunSetup one = with_fault(-1, 0, [](float*) {});
    one.policy = s.policy;
    one.steps = 1;
    EXPECT_TRUE(train(one).parameters == skipped.parameters);  // as after the step before
    s.steps = 4;
    EXPECT_EQ(train(s).skipped, (std::vector<bool>{false, true, false, false}));
  }
}

TEST(Failure, AnExceptionOnOneRankReachesAllWithItsPlace) {
  for (const char* policy : {"none", "full"}) {
    RunSetup s = with_fault(2, 1, [](float*) { throw Error("the fault"); });
    s.policy.policy = policy;
    try {
      train(s);
      FAIL() << "no error";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("step 2: block 1 forward: fault: the fault"), std::string::npos) << e.what();
    }
  }
}

TEST(Failure, ATokenOutsideTheVocabularyIsNamed) {
  RunSetup s;  // batches for 257 words, a model of 200
  s.make = [](const RunSetup& setup, int) {
    ModelConfig smaller = setup.model;
    smaller.vocab = 200;
    return make_model(smaller);
  };
  try {
    train(s);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("embedding forward: embedding: token"), std::string::npos) << e.what();
  }
}

// A block with a parameter that nothing reads, or reads without effect.
class ExtraParameter final : public Block {
 public:
  enum class Use { None, TimesZero };
  ExtraParameter(std::unique_ptr<const Block> inner, Use use, int id) : inner_(std::move(inner)), use_(use), id_(id) {}
  Activations forward(Run& run, const Activations& in) const override {
    if (use_ == Use::None) return inner_->forward(run, in);
    Activations x = run.apply(std::make_unique<AddNothing>(), {in[0]}, {id_});
    return inner_->forward(run, x);
  }

 private:
  struct AddNothing final : Op {
    std::string_view name() const override { return "add_nothing"; }
    std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape>) const override {
      return {in[0]};
    }
    Saved saved(const Needs&) const override { return {}; }
    void forward(const Call& call) const override {
      call.param(0);
      std::copy_n(call.in[0].data(), call.in[0].numel(), call.out[0].fresh());
    }
    void backward(const BackwardCall& call) const override {
      call.dparam(0);
      std::copy_n(call.dout[0].data(), call.dout[0].numel(), call.din[0].fresh());
    }
  };
  std::unique_ptr<const Block> inner_;
  Use use_;
  int id_;
};

std::string message_with_extra(ExtraParameter::Use use, bool optional, bool trainable) {
  RunSetup s;
  s.make = [=](const RunSetup& setup, int) {
    Model model = make_model(setup.model);
    auto& unit = model.units.at(static_cast<std::size_t>(model.blocks[2].units[0]));
    const int id = static_cast<int>(unit.params.size());
    unit.params.push_back(
        {.name = "extra", .shape = {5}, .init = ones(), .trainable = trainable, .optional = optional});
    auto& block = model.blocks[2].block;
    block = std::make_unique<ExtraParameter>(std::move(block), use, id);
    return model;
  };
  return failure_of(s);
}

TEST(Learning, AParameterThatNothingReadsIsAnErrorNamingIt) {
  const std::string message = message_with_extra(ExtraParameter::Use::None, false, true);
  EXPECT_NE(message.find("step 1: parameter extra is trainable, but no backward"), std::string::npos) << message;
  EXPECT_EQ(message_with_extra(ExtraParameter::Use::None, true, true), "");
  EXPECT_EQ(message_with_extra(ExtraParameter::Use::None, false, false), "");
}

TEST(Learning, AParameterWithoutGradientInTheFirstStepsIsAnErrorNamingIt) {
  const std::string message = message_with_extra(ExtraParameter::Use::TimesZero, false, true);
  EXPECT_NE(message.find("step 2: the gradient of parameter extra was zero in every element of the first 2 steps"),
            std::string::npos)
      << message;
  EXPECT_EQ(message_with_extra(ExtraParameter::Use::TimesZero, true, true), "");
}

TEST(Learning, AModelWithNothingToTrainIsRefused) {
  RunSetup s;
  s.model.frozen = {"*"};
  EXPECT_THROW(train(s), UsageError);
}

TEST(Learning, FrozenParametersLetGradientsThroughUnchanged) {
  for (const char* policy : {"none", "full", "segments"}) {
    RunSetup s;
    s.policy.policy = policy;
    const RunResult all = train(s);
    s.model.frozen = {"h.1.*", "h.3.mlp.*"};
    s.steps = 1;
    const RunResult frozen = train(s);
    RunSetup one;
    one.policy.policy = policy;
    one.steps = 1;
    const RunResult free = train(one);
    for (const auto& [name, gradient] : frozen.gradients) EXPECT_TRUE(gradient == free.gradients.at(name)) << name;
    EXPECT_LT(frozen.gradients.size(), free.gradients.size());
  }
}

}  // namespace
}  // namespace regather::testing
