// What can go wrong when an operation runs again, or when a value comes back, under the policies that make it happen.
#include <gtest/gtest.h>

#include <atomic>

#include "tests/launcher/faulty_block.h"
#include "tests/launcher/training_run.h"

namespace regather::testing {
namespace {

RunSetup setup(const PolicyOptions& policy) {
  RunSetup s;
  s.policy = policy;
  return s;
}

std::vector<PolicyOptions> policies_that_rerun() {
  return {{.policy = "full"},
          {.policy = "every_n_layers", .every_n_layers = 1},
          {.policy = "layers", .layers = {1}},
          {.policy = "segments", .segments = 2},
          {.policy = "selective", .keep = {{.keep = {"qkv", "mlp"}}}},
          {.policy = "full", .order = Order::Ahead},
          {.policy = "full", .offload = {.names = {"all"}}}};
}

// Runs with this fault in front of block 1 of every rank; `again` is called at its reruns. Returns the error.
std::string failure(RunSetup s, const std::function<void(std::uint64_t step, float* values)>& again) {
  s.make = [&](const RunSetup& of, int) {
    Model model = make_model(of.model);
    auto last_step = std::make_shared<std::uint64_t>(~std::uint64_t{0});
    put_fault(model, 1, [&again, last_step](std::uint64_t step, float* values, std::int64_t) {
      if (std::exchange(*last_step, step) == step) again(step, values);
    });
    return model;
  };
  return failure_of(s);
}

TEST(FailingRerun, EndsTheStepNamingBlockAndOperationUnderEveryPolicy) {
  for (const PolicyOptions& policy : policies_that_rerun()) {
    const std::string text =
        failure(setup(policy), [](std::uint64_t, float*) { throw Error("the table is not there any more"); });
    EXPECT_NE(text.find("block 1 "), std::string::npos) << policy.policy << ": " << text;
    EXPECT_NE(text.find("rerun of fault: the table is not there any more"), std::string::npos) << text;
  }
}

// With a reduction, a gather and copies in flight, of which nothing may reach the step that is taken instead.
TEST(FailingRerun, OfEveryRankLeavesAStepThatCanBeTakenAgain) {
  for (const PolicyOptions& policy :
       {PolicyOptions{.policy = "full"}, PolicyOptions{.policy = "full", .offload = {.names = {"all"}}}})
    for (const Strategy strategy : {Strategy::Full, Strategy::Gradients, Strategy::Optimizer, Strategy::None}) {
      SCOPED_TRACE(
          fmt::format("{} marks offloaded, strategy {}", policy.offload.names.size(), static_cast<int>(strategy)));
      RunSetup s = setup(policy);
      s.strategy = strategy;
      const RunResult expected = train(s);
      s.delay = std::chrono::milliseconds(1);
      s.retries = 1;
      const auto failed = std::make_shared<std::atomic<int>>(0);
      s.make = [&](const RunSetup& of, int) {
        Model model = make_model(of.model);
        put_fault(model, 1, [failed, runs = std::make_shared<int>(0)](std::uint64_t step, float*, std::int64_t) {
          if (step == 1 && ++*runs == 2 && ++*failed) throw Error("not this time");
        });
        return model;
      };
      const RunResult again = train(s);
      EXPECT_EQ(*failed, 2);
      EXPECT_EQ(again.losses, expected.losses);
      EXPECT_EQ(again.norms, expected.norms);
      EXPECT_EQ(again.gradients, expected.gradients);
      EXPECT_EQ(again.parameters, expected.parameters);
    }
}

// A counter, a cache, a random number outside the key: the second run makes other numbers, and training would go on.
TEST(Audit, AnOperationThatMakesOtherNumbersWhenRunAgainEndsTheRun) {
  for (const PolicyOptions& policy : policies_that_rerun()) {
    RunSetup s = setup(policy);
    s.steps = 3;
    const auto again = [](std::uint64_t, float* values) { values[0] += 1; };
    EXPECT_EQ(failure(s, again), "") << "nobody looks";
    s.audit = 1;  // block 1 is looked at in the second step
    const std::string text = failure(s, again);
    EXPECT_NE(text.find("step 2"), std::string::npos) << policy.policy << ": " << text;
    EXPECT_NE(text.find("block 1 "), std::string::npos) << text;
    EXPECT_NE(text.find("operation fault made other numbers when run again"), std::string::npos) << text;
  }
}

TEST(Audit, LooksAtEveryBlockInTurnEverySoManySteps) {
  RunSetup s = setup({.policy = "full"});
  s.audit = 2;  // steps 2, 4, 6: blocks 0, 1, 2
  std::uint64_t last = 0;
  s.steps = 5;
  s.world = 1;
  const std::string text = failure(s, [&](std::uint64_t step, float* values) {
    last = step + 1;
    values[0] += 1;
  });
  EXPECT_EQ(last, 4U);
  EXPECT_NE(text.find("step 4"), std::string::npos) << text;
}

TEST(FailingCopy, EndsTheRunWithItsReason) {
  for (const Stream broken : {Stream::ToHost, Stream::ToDevice}) {
    RunSetup s = setup({.policy = "none", .offload = {.names = {"all"}}});
    s.prepare = [broken](CpuDevice& device) {
      device.before_copy = [broken, copies = 0](Stream stream, std::int64_t) mutable {
        if (stream == broken && ++copies == 20) throw Error("the link is down");
      };
    };
    const std::string text = failure(s, [](std::uint64_t, float*) {});
    EXPECT_NE(text.find("offload of activations: the link is down"), std::string::npos) << text;
    EXPECT_NE(text.find(broken == Stream::ToHost ? "forward" : "backward"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace regather::testing
