// What every rank must agree on, whatever the strategy and however sizes divide: start values, replicas after every
// update, and the rows of a tied table that the last rank owns.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>
#include <set>

#include "tensor/hash.h"
#include "tests/launcher/training_run.h"

namespace regather::testing {
namespace {

// A hash of all parameters as a rank's next forward would read them.
std::uint64_t hash_of_parameters(Trainer& trainer) {
  std::uint64_t hash = 0;
  for (auto& unit : trainer.stack().units()) {
    const auto lease = unit->acquire(Pass::Evaluation);
    for (std::size_t i = 0; i < unit->table().size(); ++i)
      hash = mix(hash, hash_of(unit->data(static_cast<int>(i)),
                               static_cast<std::size_t>(unit->table()[i].shape.numel()) * sizeof(float)));
  }
  for (auto& unit : trainer.stack().units()) unit->evict();
  return hash;
}

// By step (0: start values) and rank.
std::vector<std::vector<std::uint64_t>> hashes_of_run(const RunSetup& s) {
  std::vector<std::vector<std::uint64_t>> hashes(static_cast<std::size_t>(s.steps) + 1,
                                                 std::vector<std::uint64_t>(static_cast<std::size_t>(s.world)));
  const Model model = make_model(s.model);
  run_ranks(s.world, {}, [&](Communicator& comm) {
    CpuDevice device;
    Trainer trainer(model, device, comm, trainer_options(s));
    for (int step = 0; step <= s.steps; ++step) {
      hashes[static_cast<std::size_t>(step)][static_cast<std::size_t>(comm.rank())] = hash_of_parameters(trainer);
      const Batch batch = make_batch(device, s, comm.rank(), comm.size(), step, 0);
      if (step < s.steps) trainer.step({&batch, 1});
    }
  });
  return hashes;
}

TEST(Replicas, AreEqualOnAllRanksAfterEveryUpdate) {
  for (const Strategy strategy : {Strategy::Full, Strategy::Gradients, Strategy::Optimizer, Strategy::None})
    for (const int world : {2, 3}) {
      RunSetup s;
      s.strategy = strategy;
      s.world = world;
      s.steps = 3;
      const auto hashes = hashes_of_run(s);
      std::set<std::uint64_t> different;
      for (const auto& of_step : hashes) {
        for (std::uint64_t h : of_step) EXPECT_EQ(h, of_step[0]);
        different.insert(of_step[0]);
      }
      EXPECT_EQ(different.size(), hashes.size()) << "a step changed nothing";
    }
}

TEST(StartValues, AreTheSameForAnyWorldAndStrategyAndDifferBySeed) {
  RunSetup s;
  s.steps = 0;
  s.world = 1;
  const std::uint64_t one = hashes_of_run(s)[0][0];
  for (const Strategy strategy : {Strategy::Full, Strategy::Gradients, Strategy::None})
    for (const int world : {1, 2, 3, 4}) {
      s.strategy = strategy;
      s.world = world;
      const auto hashes = hashes_of_run(s);
      for (std::uint64_t h : hashes[0]) EXPECT_EQ(h, one);
    }
  s.seed = 2;
  EXPECT_NE(hashes_of_run(s)[0][0], one);
}

// Before anything is summed over ranks there is nothing to round differently: a sequence's losses have the same bits
// whoever computes them.
TEST(TokenLosses, AreTheSameBitsOnAnyNumberOfRanks) {
  const auto losses_of_sequences = [](int world, Strategy strategy) {
    RunSetup s;
    s.world = world;
    s.strategy = strategy;
    s.micro_batch = 1;
    s.plan.micro_batches = 12 / world;
    std::map<std::int64_t, std::vector<float>> losses;
    std::mutex mutex;
    const Model model = make_model(s.model);
    run_ranks(world, {}, [&](Communicator& comm) {
      CpuDevice device;
      Trainer trainer(model, device, comm, trainer_options(s));
      for (int m = 0; m < s.plan.micro_batches; ++m) {
        const Batch batch = make_batch(device, s, comm.rank(), world, 0, m);
        const Tensor of_tokens = trainer.stack().evaluate(batch.tokens, batch.targets);
        const std::lock_guard lock(mutex);
        losses[batch.first_sequence].assign(of_tokens.data(), of_tokens.data() + of_tokens.numel());
      }
    });
    return losses;
  };
  const auto alone = losses_of_sequences(1, Strategy::Full);
  EXPECT_EQ(alone.size(), 12U);
  for (const int world : {2, 3, 4})
    for (const Strategy strategy : {Strategy::Full, Strategy::Gradients, Strategy::None})
      EXPECT_TRUE(losses_of_sequences(world, strategy) == alone) << world << " ranks";
}

TEST(TiedTable, EveryRowLearnsWhoeverOwnsIt) {
  for (const std::int64_t vocab : {11, 257}) {
    RunSetup s;
    s.model.vocab = vocab;
    s.world = 1;
    s.micro_batch = 12;
    s.steps = 5;
    s.lr = 0.1;
    s.optimizer = {.type = OptimizerOptions::Type::Sgd};
    const RunResult one = train(s);
    RunSetup untouched = s;
    untouched.lr = 0;
    const auto start = train(untouched).parameters.at("wte.weight");
    for (const int world : {2, 3, 4})
      for (const Strategy strategy : {Strategy::Full, Strategy::Gradients, Strategy::Optimizer, Strategy::None}) {
        s.world = world;
        s.strategy = strategy;
        s.micro_batch = 12 / world;
        const auto table = train(s).parameters.at("wte.weight");
        for (std::size_t row = 0; row < static_cast<std::size_t>(vocab); ++row) {
          float difference = 0, moved = 0, moved_alone = 0;
          for (std::size_t i = row * 32; i < row * 32 + 32; ++i) {
            difference = std::max(difference, std::abs(table[i] - one.parameters.at("wte.weight")[i]));
            moved = std::max(moved, std::abs(table[i] - start[i]));
            moved_alone = std::max(moved_alone, std::abs(one.parameters.at("wte.weight")[i] - start[i]));
          }
          ASSERT_LE(difference, 1e-5F) << "row " << row << ", " << world << " ranks";
          ASSERT_EQ(moved > 0, moved_alone > 0) << "row " << row << ", " << world << " ranks";
        }
      }
  }
}

}  // namespace
}  // namespace regather::testing
