// Blocks with several inputs and outputs, one of them without a gradient, under every policy: the same bits, the closed
// forms of traffic, the planned peak, and errors that say where they come from.
#include <gtest/gtest.h>

#include <chrono>

#include "ckpt/keep_sets.h"
#include "tensor/check_gradients.h"
#include "tests/launcher/expected_volume.h"
#include "tests/launcher/two_streams.h"

namespace regather::testing {
namespace {

constexpr int kLayers = 4;

std::vector<PolicyOptions> every_policy() {
  const std::vector<SavePlan> planned{drop_all(), keep_only({"z", "a.up"}), keep_only({"b.act"}), keep_all()};
  const std::vector<KeepRule> keep{{.keep = {"z", "b.*"}}, {.layers = {1}, .keep = {"a.scaled"}}};
  std::vector<PolicyOptions> all;
  for (const Policy& policy : policies())
    all.push_back({.policy = std::string(policy.name), .layers = {0, 2}, .keep = keep, .planned = planned});
  for (const Order order : {Order::Ahead, Order::Eager}) {
    all.push_back({.policy = "full", .order = order});
    all.push_back({.policy = "selective", .keep = keep, .order = order});
  }
  for (const char* policy : {"none", "full", "segments", "selective"})
    all.push_back({.policy = policy, .keep = keep, .offload = {.names = {"all"}}});
  all.push_back({.policy = "segments", .segments = 3});
  return all;
}

TEST(SeveralInputs, GradientsOfTheBlockAreThoseOfItsForward) {
  const std::int64_t c = 8;
  const GradientCheck checked =
      check_gradients(StreamsBlock(0.0F),
                      {{.shape = {1, 3, c}}, {.shape = {1, 3, c}}, {.shape = {1, 3}, .dtype = DType::I32, .high = 7}},
                      streams_block_params("h.", c));
  EXPECT_EQ(checked.disagreement, "");
}

TEST(SeveralInputs, EveryPolicyGivesTheSameBitsTheTrafficOfItsClosedFormAndThePlannedPeak) {
  for (const auto reads : {StreamsHead::Reads::Both, StreamsHead::Reads::First})
    for (const auto order : {AccumulationOrder::BatchMajor, AccumulationOrder::LayerMajor}) {
      RunSetup s = two_streams(reads);
      s.model.dropout = 0.1F;
      s.plan.micro_batches = 2;
      s.plan.order = order;
      s.audit = 1;
      const RunResult none = train(s);
      EXPECT_EQ(none.gradients.size(), 3U + 8 * kLayers + 2);
      const std::int64_t M = order == AccumulationOrder::BatchMajor ? 2 : 1, D = s.plan.slots;
      for (const PolicyOptions& policy : every_policy()) {
        s.policy = policy;
        const std::string what = fmt::format("{} {}", policy.policy, policy.offload.names.empty() ? "" : "offloaded");
        const RunResult r = train(s);
        EXPECT_EQ(r.losses, none.losses) << what;
        EXPECT_TRUE(r.gradients == none.gradients) << what;
        EXPECT_TRUE(r.parameters == none.parameters) << what;
        const bool uneven = policy.policy == "segments" && policy.segments == 3;
        if (!uneven) {  // two segments of two blocks, which are resident: as without
          EXPECT_EQ(total(r.collectives[1], Collective::AllGather, "block").count, batch_major_gathers(kLayers, M, D))
              << what;
        }
        EXPECT_EQ(total(r.collectives[1], Collective::ReduceScatter, "block").count, kLayers * M) << what;
        RunSetup dry = s;
        dry.mode = Allocator::Mode::Meta;
        dry.audit = 0;
        RunResult planned;
        std::mutex mutex;
        run_rank(dry, make_two_streams(dry.model, reads), *make_dry_communicator(0, dry.world), planned, mutex);
        EXPECT_EQ(planned.peak_total, r.peak_total) << what;
      }
    }
}

TEST(SeveralInputs, WorldsAgreeWithinRounding) {
  RunSetup s = two_streams();
  s.steps = 1;
  s.world = 1;
  s.micro_batch = 4;
  const RunResult one = train(s);
  s.world = 4;
  s.micro_batch = 1;
  s.policy.policy = "full";
  const RunResult four = train(s);
  EXPECT_NEAR(one.losses[0], four.losses[0], 2e-6 * one.losses[0]);
  EXPECT_NEAR(one.norms[0], four.norms[0], 1e-5 * one.norms[0]);
}

// Both streams are the block's input, and the tokens, which are there anyway.
TEST(SeveralInputs, WhatABlockMayKeepBeginsWithAllOfItsInputs) {
  const RunSetup s = two_streams();
  const Model model = make_two_streams(s.model);
  const auto sets = keep_sets(model, {s.micro_batch, s.sequence}, Order::Lazy,
                              [](const Recorder::Interval& i) { return i.work.bytes; });
  const std::int64_t stream = s.micro_batch * s.sequence * s.model.hidden * 4;
  for (const BlockKeepSets& of_block : sets) {
    EXPECT_EQ(of_block.nothing.activations.kept, 2 * stream);
    EXPECT_LT(of_block.whole.flops, of_block.nothing.flops);
    EXPECT_GT(of_block.sets.size(), 3U);
  }
}

// On one rank of three, in the backward's rerun: it says where, and the others do not wait for it.
TEST(SeveralInputs, AnOperationThatFailsInTheRecomputeEndsAllRanksAndIsNamed) {
  for (const PolicyOptions& policy : every_policy()) {
    RunSetup s = two_streams();
    s.world = 3;
    s.policy = policy;
    const auto make = [&](bool faulty) {
      Model model = make_two_streams(s.model);
      auto runs = std::make_shared<int>(0);
      put_fault(model, 2, [runs, faulty](std::uint64_t, float*, std::int64_t) {
        if (faulty && ++*runs == 2) throw Error("the table is not there any more");
      });
      return model;
    };
    std::array<std::string, 3> heard;
    const auto begin = std::chrono::steady_clock::now();
    try {
      SimOptions options;
      options.checked = true;
      RunResult result;
      std::mutex mutex;
      run_ranks(s.world, options, [&](Communicator& comm) {
        const Model model = make(comm.rank() == 1);
        try {
          run_rank(s, model, comm, result, mutex);
        } catch (const Error& e) {
          heard[static_cast<std::size_t>(comm.rank())] = e.what();
          throw;
        }
      });
    } catch (const Error&) {  // of the rank that failed first; each one's is looked at below
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30)) << policy.policy;
    const bool second_step =
        heard[1].find("step 2") != std::string::npos;  // not rerun: the second execution is a forward
    EXPECT_NE(heard[1].find(second_step ? "block 2 forward" : "block 2 "), std::string::npos) << heard[1];
    EXPECT_NE(heard[1].find("fault: the table is not there any more"), std::string::npos) << heard[1];
    if (policy.policy == "full") {
      EXPECT_NE(heard[1].find("block 2 backward: rerun of fault: "), std::string::npos) << heard[1];
    }
    for (const int other : {0, 2})
      EXPECT_NE(heard[static_cast<std::size_t>(other)].find("rank 1"), std::string::npos)
          << policy.policy << ": " << heard[static_cast<std::size_t>(other)];
  }
}

}  // namespace
}  // namespace regather::testing
