// What a step communicates, against closed forms that are written here and use nothing of the code that communicates.
#include <gtest/gtest.h>

#include "tests/launcher/expected_volume.h"
#include "tests/launcher/faulty_block.h"
#include "tests/launcher/training_run.h"

namespace regather::testing {
namespace {

RunSetup setup(int world, int layers, int slots, int micro_batches) {
  RunSetup s;
  s.model.layers = layers;
  s.model.hidden = 8;
  s.model.vocab = 11;
  s.sequence = 4;
  s.micro_batch = 1;
  s.steps = 1;
  s.world = world;
  s.plan.slots = slots;
  s.plan.micro_batches = micro_batches;
  return s;
}

// All but segments, whose replays gather again; two of them with values in host memory.
std::vector<PolicyOptions> every_policy(int layers) {
  std::vector<SavePlan> planned(static_cast<std::size_t>(layers), keep_only({"mid", "attn.core"}));
  planned.front() = {.unmarked = Placement::Drop, .inputs = Placement::Offload, .marks = {{"mid", Placement::Offload}}};
  return {{.policy = "none"},
          {.policy = "full"},
          {.policy = "every_n_layers"},
          {.policy = "selective"},
          {.policy = "budget", .planned = planned},
          {.policy = "full", .offload = {.names = {"all"}}}};
}

TEST(Volume, OneMicroBatchGathersEveryBlockTwiceLessTheResidentOnes) {
  for (const int world : {2, 4})
    for (const int layers : {3, 5})
      for (int slots = 1; slots <= layers; ++slots)
        for (const PolicyOptions& policy : every_policy(layers)) {
          RunSetup s = setup(world, layers, slots, 1);
          s.policy = policy;
          const RunResult r = train(s);
          const UnitSizes sizes(s.model, world);
          const auto gathers = total(r.collectives[0], Collective::AllGather, "block");
          const auto reductions = total(r.collectives[0], Collective::ReduceScatter, "block");
          EXPECT_EQ(gathers.count, 2 * layers - slots);
          EXPECT_EQ(gathers.wire_bytes, (2 * layers - slots) * (world - 1) * sizes.block_shard * 4);
          EXPECT_EQ(total(r.collectives[0], Collective::AllGather, "block", Pass::Forward).count, layers);
          EXPECT_EQ(reductions.count, layers);
          EXPECT_EQ(reductions.wire_bytes, layers * (world - 1) * sizes.block_shard * 4);
        }
}

TEST(Volume, MicroBatchesOneAfterTheOther) {
  for (const int layers : {4, 6})
    for (const int micro : {1, 3})
      for (int slots = 1; slots <= layers; ++slots)
        for (const char* policy : {"none", "full", "layers", "selective", "segments"}) {
          RunSetup s = setup(layers / 2, layers, slots, micro);
          s.policy = {.policy = policy, .segments = 2, .layers = {1, 2}, .keep = {{.keep = {"qkv", "mlp"}}}};
          const int K = layers / 2;
          const std::int64_t expected = s.policy.policy == "segments" && slots <= K
                                            ? segment_gathers(layers, micro, slots, 2, K)
                                            : batch_major_gathers(layers, micro, slots);
          const RunResult r = train(s);
          EXPECT_EQ(total(r.collectives[0], Collective::AllGather, "block").count, expected)
              << policy << " L " << layers << " M " << micro << " D " << slots;
          EXPECT_EQ(total(r.collectives[0], Collective::ReduceScatter, "block").count, layers * micro);
        }
}

TEST(Volume, AllMicroBatchesThroughABlockCountAsOne) {
  for (const int micro : {1, 2, 3})
    for (int slots = 1; slots <= 6; ++slots)
      for (const char* policy : {"none", "full", "selective", "segments"}) {
        RunSetup s = setup(2, 6, slots, micro);
        s.plan.order = AccumulationOrder::LayerMajor;
        s.policy = {.policy = policy, .segments = 2};
        const std::int64_t expected = s.policy.policy == "segments" && slots <= 3 ? segment_gathers(6, 1, slots, 2, 3)
                                                                                  : batch_major_gathers(6, 1, slots);
        const RunResult r = train(s);
        EXPECT_EQ(total(r.collectives[0], Collective::AllGather, "block").count, expected)
            << policy << " M " << micro << " D " << slots;
        EXPECT_EQ(total(r.collectives[0], Collective::ReduceScatter, "block").count, 6);
      }
}

TEST(Volume, RootUnitsByName) {
  for (const int world : {2, 3, 4})
    for (const int micro : {1, 3})
      for (const auto order : {AccumulationOrder::BatchMajor, AccumulationOrder::LayerMajor}) {
        RunSetup s = setup(world, 4, 2, micro);
        s.plan.order = order;
        const RunResult r = train(s);
        const UnitSizes sizes(s.model, world);
        const std::int64_t times = order == AccumulationOrder::LayerMajor ? 1 : micro;
        // The tied table: once for the lookup, once for the head's forward and backward; both contributions are
        // reduced.
        const auto table = total(r.collectives[0], Collective::AllGather, "wte");
        EXPECT_EQ(table.count, 2 * times);
        EXPECT_EQ(table.wire_bytes, 2 * times * (world - 1) * sizes.table_shard * 4);
        EXPECT_EQ(total(r.collectives[0], Collective::ReduceScatter, "wte").count, 2 * times);
        EXPECT_EQ(total(r.collectives[0], Collective::AllGather, "wpe").count, times);
        EXPECT_EQ(total(r.collectives[0], Collective::ReduceScatter, "wpe").count, times);
        EXPECT_EQ(total(r.collectives[0], Collective::AllGather, "head").count, times);
        EXPECT_EQ(total(r.collectives[0], Collective::ReduceScatter, "head").count, times);
      }
}

TEST(Volume, ReducingOnceReducesEveryUnitOnce) {
  RunSetup s = setup(2, 4, 2, 3);
  s.plan.reduce = ReduceWhen::Once;
  const RunResult r = train(s);
  for (const char* unit : {"wte", "wpe", "head"})
    EXPECT_EQ(total(r.collectives[0], Collective::ReduceScatter, unit).count, 1) << unit;
  EXPECT_EQ(total(r.collectives[0], Collective::ReduceScatter, "block").count, 4);
}

TEST(Volume, ReplicatedParametersAreGatheredAfterTheOptimizerOnly) {
  for (const Strategy strategy : {Strategy::Gradients, Strategy::Optimizer})
    for (const int micro : {1, 2}) {
      RunSetup s = setup(3, 4, 2, micro);
      s.strategy = strategy;
      const RunResult r = train(s);
      const UnitSizes sizes(s.model, 3);
      const auto refresh = total(r.collectives[0], Collective::AllGather, "block", Pass::Optimizer);
      EXPECT_EQ(refresh.count, 4);
      EXPECT_EQ(refresh.wire_bytes, 4 * 2 * sizes.block_shard * 4);
      EXPECT_EQ(total(r.collectives[0], Collective::AllGather, "block").count, 4);
      EXPECT_EQ(total(r.collectives[0], Collective::ReduceScatter, "block").count, 4 * micro);
    }
}

TEST(Volume, DataParallelRanksOnlyAllReduce) {
  for (const int micro : {1, 2}) {
    RunSetup s = setup(2, 4, 2, micro);
    s.strategy = Strategy::None;
    const RunResult r = train(s);
    for (const auto& [key, counts] : r.collectives[0]) EXPECT_EQ(key.collective, Collective::AllReduce) << key.unit;
    EXPECT_EQ(total(r.collectives[0], Collective::AllReduce, "block").count, 4 * micro);
  }
}

// What a run fails with in which block 1 gathers once more, by itself, at this execution of its forward.
std::string failure_with_another_gather(const RunSetup& s, Pass pass, int execution,
                                        const std::function<void(Trainer&, const Batch&)>& act) {
  try {
    run_ranks(2, {}, [&](Communicator& comm) {
      CpuDevice device;
      Model model = make_model(s.model);
      const std::int64_t shard = UnitSizes(s.model, 2).block_shard;
      std::vector<float> again(static_cast<std::size_t>(2 * shard));
      int executions = 0;
      put_fault(model, 1, [&](std::uint64_t, float*, std::int64_t) {
        if (++executions != execution) return;
        const GatherBuffer buffer{again.data(), shard, DType::F32};
        comm.all_gather({&buffer, 1}, {"block", pass}).wait();
      });
      Trainer trainer(model, device, comm, trainer_options(s));
      act(trainer, make_batch(device, s, comm.rank(), 2, 0, 0));
    });
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

// As a wrapper that gathers again for its recompute would make; the first execution is forward's.
TEST(Volume, ASecondGatherInARecomputeEndsTheStep) {
  RunSetup s = setup(2, 4, 2, 1);
  s.policy.policy = "full";
  const std::string message =
      failure_with_another_gather(s, Pass::Backward, 2, [](Trainer& trainer, const Batch& batch) {
        trainer.step({&batch, 1});
      });
  EXPECT_NE(message.find("communicated other than planned"), std::string::npos) << message;
  EXPECT_NE(message.find("all_gather"), std::string::npos) << message;
}

TEST(Volume, AnEvaluationGathersWhatEachPartUsesOnceABatch) {
  for (const int world : {1, 2, 3})
    for (const Strategy strategy : {Strategy::Full, Strategy::Gradients, Strategy::None}) {
      RunSetup s = setup(world, 4, 2, 3);
      s.strategy = strategy;
      const Model model = make_model(s.model);
      const UnitSizes sizes(s.model, world);
      run_ranks(world, {}, [&](Communicator& comm) {
        CpuDevice device;
        Trainer trainer(model, device, comm, trainer_options(s));
        std::vector<Batch> batches;
        for (int m = 0; m < 3; ++m) batches.push_back(make_batch(device, s, comm.rank(), world, 0, m));
        EXPECT_TRUE(trainer.evaluate(batches).audit.empty());
        const std::int64_t times = strategy == Strategy::Full ? 3 : 0;
        const auto gathers = [&](std::string_view unit) {
          return total(comm.ledger().entries(), Collective::AllGather, unit, Pass::Evaluation);
        };
        EXPECT_EQ(gathers("block").count, 4 * times);
        EXPECT_EQ(gathers("block").wire_bytes, 4 * times * (world - 1) * sizes.block_shard * 4);
        EXPECT_EQ(gathers("wte").count, 2 * times);  // the lookup and the head are far apart
        EXPECT_EQ(gathers("wte").wire_bytes, 2 * times * (world - 1) * sizes.table_shard * 4);
        EXPECT_EQ(gathers("wpe").count, times);
        EXPECT_EQ(gathers("head").count, times);
        const auto scalars = total(comm.ledger().entries(), Collective::AllReduce, "scalars");
        EXPECT_EQ(scalars.count, 1);
        EXPECT_EQ(scalars.wire_bytes, 3 * 8 * (world - 1));
        EXPECT_EQ(comm.ledger().entries().size(), times > 0 ? 5U : 1U);
      });
    }
}

TEST(Volume, ASecondGatherInAnEvaluationIsAnError) {
  RunSetup s = setup(2, 4, 2, 1);
  const std::string message =
      failure_with_another_gather(s, Pass::Evaluation, 1, [](Trainer& trainer, const Batch& batch) {
        trainer.evaluate({&batch, 1});
      });
  EXPECT_NE(message.find("evaluation after step 0: the evaluation communicated other than planned"), std::string::npos)
      << message;
}

TEST(Volume, AStepWithoutTokensCommunicatesTheirNumberAlone) {
  for (const int world : {1, 2, 3}) {
    RunSetup s = setup(world, 4, 2, 1);
    s.counted = [](std::uint64_t, std::int64_t) { return false; };
    const RunResult r = train(s);
    ASSERT_EQ(r.collectives[0].size(), 1U);
    const auto scalars = total(r.collectives[0], Collective::AllReduce, "scalars", Pass::Step);
    EXPECT_EQ(scalars.count, 1);
    EXPECT_EQ(scalars.wire_bytes, 8 * (world - 1));
  }
}

// The tokens; then the loss, the norm, and whether to stop; in the first two steps which of the tensors have a
// gradient.
TEST(Volume, ScalarsOfAStepAreSummedInTwoCalls) {
  RunSetup s = setup(3, 4, 2, 1);
  s.steps = 3;
  const RunResult r = train(s);
  const std::int64_t tensors = 12 * 4 + 4;
  for (const std::size_t step : {0U, 2U}) {
    const auto scalars = total(r.collectives[step], Collective::AllReduce, "scalars", Pass::Step);
    EXPECT_EQ(scalars.count, step == 0 ? 3 : 2);
    EXPECT_EQ(scalars.wire_bytes, 2 * 8 * (4 + (step == 0 ? tensors : 0)));
  }
}

TEST(Stopping, IsAgreedOnByAllRanksWithinTheStepOrEvaluationInWhichOneIsAsked) {
  const RunSetup s = setup(3, 4, 2, 1);
  const Model model = make_model(s.model);
  run_ranks(3, {}, [&](Communicator& comm) {
    CpuDevice device;
    bool asked = false;
    TrainerOptions options = trainer_options(s);
    options.stop_asked = [&] { return asked; };
    Trainer trainer(model, device, comm, options);
    const Batch batch = make_batch(device, s, comm.rank(), 3, 0, 0);
    trainer.step({&batch, 1});
    EXPECT_FALSE(trainer.stop_asked());
    asked = comm.rank() == 1;
    trainer.step({&batch, 1});
    EXPECT_TRUE(trainer.stop_asked());
    asked = false;
    trainer.evaluate({&batch, 1});
    EXPECT_FALSE(trainer.stop_asked());
    asked = comm.rank() == 2;
    trainer.evaluate({&batch, 1});
    EXPECT_TRUE(trainer.stop_asked());
  });
}

TEST(Volume, FrozenParametersAreGatheredButNeverReduced) {
  RunSetup s = setup(2, 4, 2, 1);
  const RunResult trained = train(s);
  s.model.frozen = {"*.c_attn.*", "*.mlp.*"};
  const RunResult frozen = train(s);
  const UnitSizes sizes(s.model, 2);
  EXPECT_EQ(total(frozen.collectives[0], Collective::AllGather, "block").count,
            total(trained.collectives[0], Collective::AllGather, "block").count);
  const std::int64_t C = s.model.hidden, frozen_elements = 3 * C * C + 3 * C + 8 * C * C + 5 * C;
  EXPECT_EQ(total(frozen.collectives[0], Collective::ReduceScatter, "block").wire_bytes,
            4 * (12 * C * C + 13 * C - frozen_elements) / 2 * 4);
  EXPECT_FALSE(frozen.gradients.contains("h.0.attn.c_attn.weight"));
  EXPECT_TRUE(frozen.gradients.contains("h.0.attn.c_proj.weight"));
}

}  // namespace
}  // namespace regather::testing
