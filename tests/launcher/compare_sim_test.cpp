// Measuring under several policies, with ranks as threads.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>

#include "launcher/compare_measure.h"
#include "tests/launcher/temporary_folder.h"

namespace regather::testing {
namespace {

// A small model on text in `folder`.
Config small(const TemporaryFolder& folder, const std::string& more = "") {
  const std::filesystem::path text = folder.path() / "text";
  std::ofstream stream(text);
  for (int i = 0; i < 400; ++i) stream << "the " << i * i << "th line\n";
  stream.close();
  return parse_config(
      fmt::format("model: {{layers: 4, hidden: 32, heads: 2, max_sequence: 32}}\ndata: {{files: [{}], sequence: 32}}\n"
                  "train: {{micro_batch: 2}}\n{}",
                  text.string(), more),
      "small.yaml", {});
}

// Rank 0's comparison; the other ranks' have to agree with it.
Comparison compare(const Config& config, const CompareOptions& options, int ranks) {
  Comparison first;
  std::vector<std::string> refusals(static_cast<std::size_t>(ranks));
  std::mutex mutex;
  run_ranks(ranks, {}, [&](Communicator& comm) {
    const Comparison c = PolicyMeasurement(config, options, comm, [](std::string_view) {}).run();
    const std::lock_guard lock(mutex);
    for (const PolicyResult& p : c.policies)
      refusals[static_cast<std::size_t>(comm.rank())] +=
          fmt::format("{} {} {} {}\n", p.policy, p.refused, p.measured.total, p.slowdown);
    if (comm.rank() == 0) first = c;
  });
  for (const std::string& of_rank : refusals) EXPECT_EQ(of_rank, refusals[0]);
  return first;
}

// "all_gather forward block 8 4096"
std::vector<std::string> lines_of(const Ledger::Entries& entries) {
  std::vector<std::string> lines;
  for (const auto& [key, counts] : entries)
    lines.push_back(fmt::format("{} {} {} {} {}", name_of(key.collective), name_of(key.pass), key.unit, counts.count,
                                counts.wire_bytes));
  return lines;
}

// However few steps are measured: those that look whether every parameter learns are not what is compared.
TEST(Compare, CollectivesAreThoseOfTheForecastAndOfEveryLaterStep) {
  const TemporaryFolder folder;
  const Config config = small(folder);
  const Comparison c = compare(config, {.policies = {"full", "segments"}, .steps = 1, .rounds = 1}, 2);
  for (const PolicyResult& p : c.policies) {
    const Config own = with_policy(config, p.policy);
    EXPECT_EQ(lines_of(p.collectives), lines_of(forecast_step(own, make_model(own.model), 0, 2).collectives));
    // The tokens; the loss, the norm and whether to stop: four doubles in two calls, from one other rank.
    EXPECT_EQ(lines_of(p.collectives).back(), "all_reduce step scalars 2 32") << p.policy;
  }
}

std::int64_t activations(const PolicyResult& p) { return p.measured.peak_of[index(Tag::Activations)]; }

TEST(Compare, EveryPolicyHasTheSameNumbersAndThePlannedCommunicationAndMemory) {
  const TemporaryFolder folder;
  for (const int ranks : {1, 2, 3}) {
    const Comparison c = compare(small(folder), {.name = "small", .steps = 2, .rounds = 2}, ranks);
    ASSERT_EQ(c.policies.size(), 4U);
    EXPECT_EQ(c.reference, 0);
    EXPECT_TRUE(holds(c));
    for (const PolicyResult& p : c.policies) {
      EXPECT_TRUE(p.ran());
      EXPECT_TRUE(p.identical) << p.policy;
      EXPECT_EQ(p.loss_difference, 0) << p.policy;
      EXPECT_EQ(p.gradient_difference, 0) << p.policy;
      EXPECT_TRUE(p.as_planned()) << p.policy;
      EXPECT_EQ(p.measured.total, p.planned.total) << p.policy;
      EXPECT_EQ(p.measured.at_peak, p.planned.at_peak) << p.policy;
      EXPECT_EQ(p.step_seconds.size(), 2U);
      EXPECT_GT(p.tokens_per_second, 0);
      EXPECT_EQ(p.tokens, 2 * 32 * ranks);
    }
    EXPECT_LT(activations(c.policies[1]), activations(c.policies[0]));
    EXPECT_GT(c.policies[0].recomputed_flops, 0);  // norms, activation functions
    EXPECT_GT(c.policies[1].recomputed_flops, c.policies[0].recomputed_flops);
  }
}

TEST(Compare, TheTimelineReachesThePeakAndEndsWhereItBegan) {
  const TemporaryFolder folder;
  const Comparison c = compare(small(folder), {.policies = {"none", "full"}, .steps = 1, .rounds = 1}, 2);
  for (const PolicyResult& p : c.policies) {
    const MemoryTimeline& t = p.timeline;
    ASSERT_GT(t.points.size(), 20U);
    std::int64_t most = 0;
    double before = 0;
    for (const MemoryTimeline::Point& point : t.points) {
      std::int64_t total = 0;
      for (const Tag tag : kAllTags) total += point.live[index(tag)];
      most = std::max(most, total);
      EXPECT_GE(point.seconds, before);
      before = point.seconds;
    }
    EXPECT_EQ(most, p.measured.total) << p.policy;
    EXPECT_LE(before, t.seconds);
    EXPECT_EQ(t.points.front().live, t.points.back().live);
    EXPECT_GT(t.backward_begin, 0);
    EXPECT_GT(t.update_begin, t.backward_begin);
  }
}

TEST(Compare, APolicyOverTheLimitIsARowAndTheOthersAreComparedWithTheFirstThatFits) {
  const TemporaryFolder folder;
  const CompareOptions options{.policies = {"none", "full", "segments"}, .steps = 1, .rounds = 1};
  const Comparison free = compare(small(folder), options, 2);
  const std::int64_t limit = free.policies[0].measured.total - 1;
  const Comparison c = compare(small(folder, fmt::format("memory: {{limit: {}}}", limit)), options, 2);
  EXPECT_FALSE(c.policies[0].ran());
  EXPECT_NE(c.policies[0].refused.find("memory.limit"), std::string::npos);
  EXPECT_EQ(c.policies[0].planned.total, limit + 1);
  EXPECT_EQ(c.reference, 1);
  EXPECT_TRUE(c.policies[1].ran() && c.policies[2].ran());
  EXPECT_TRUE(holds(c));

  const Comparison exact = compare(small(folder, fmt::format("memory: {{limit: {}}}", limit + 1)), options, 2);
  EXPECT_TRUE(exact.policies[0].ran());

  const Comparison none = compare(small(folder, "memory: {limit: 1000}"), options, 2);
  EXPECT_EQ(none.reference, -1);
  for (const PolicyResult& p : none.policies) EXPECT_FALSE(p.ran());
}

TEST(Compare, ABudgetThatNoPlanMeetsIsARowToo) {
  const TemporaryFolder folder;
  const CompareOptions options{.policies = {"budget", "full"}, .steps = 1, .rounds = 1};
  const auto with_limit = [&](std::int64_t limit) {
    return compare(
        small(folder, fmt::format("memory: {{limit: {}}}\nactivation_checkpointing: {{budget: 0}}\n", limit)), options,
        2);
  };
  const Comparison fits = with_limit(1 << 30);
  EXPECT_TRUE(fits.policies[0].ran());
  const Comparison none = with_limit(1000);
  EXPECT_EQ(none.reference, -1);
  EXPECT_EQ(none.policies[0].refused.find("does not fit: it needs "), 0U) << none.policies[0].refused;
  EXPECT_GT(none.policies[0].planned.total, 1000);
  EXPECT_LE(none.policies[0].planned.total, fits.policies[1].planned.total);
}

TEST(Compare, SeveralMicroBatchesAndFrozenParametersAgreeToo) {
  const TemporaryFolder folder;
  Config config = small(folder);
  config.train.accumulation = 2;
  config.model.frozen = {"*.mlp.*"};
  const Comparison c = compare(config, {.policies = {"full", "none"}, .steps = 1, .rounds = 1}, 2);
  EXPECT_EQ(c.reference, 1);
  EXPECT_TRUE(holds(c));
  EXPECT_EQ(c.policies[0].timeline.backward_begin, 0);  // forward and backward alternate
}

TEST(Compare, ASignalEndsItAfterTheRoundsThatAreComplete) {
  const TemporaryFolder folder;
  const Config config = small(folder);
  const CompareOptions options{.policies = {"none", "full"}, .steps = 1, .rounds = 3};
  const auto stopped_after = [&](int asked_before) {
    Comparison first;
    run_ranks(2, {}, [&](Communicator& comm) {
      int asked = 0;
      PolicyMeasurement measurement(
          config, options, comm, [](std::string_view) {}, [&] { return ++asked > asked_before && comm.rank() == 1; });
      const Comparison c = measurement.run();
      if (comm.rank() == 0) first = c;
    });
    return first;
  };
  // Round 0 has 3 steps a policy, of which the last is only drawn; later ones 2.
  for (const auto& [steps, rounds] : std::map<int, int>{{5, 1}, {6, 1}, {8, 1}, {9, 1}, {10, 2}, {14, 3}}) {
    const Comparison c = stopped_after(steps);
    EXPECT_EQ(c.rounds, rounds) << steps;
    for (const PolicyResult& p : c.policies) {
      EXPECT_EQ(p.step_seconds.size(), static_cast<std::size_t>(rounds));
      EXPECT_EQ(p.spreads.size(), static_cast<std::size_t>(rounds));
      if (rounds == 1) {
        EXPECT_EQ(p.spread, p.spreads.front());
      }
    }
    EXPECT_TRUE(holds(c));
    EXPECT_GT(c.policies[1].slowdown, 0);
  }
  for (const int steps : {0, 1, 3, 4}) EXPECT_THROW(stopped_after(steps), Error) << steps;
}

TEST(Compare, RanksWithOtherOptionsAreRefused) {
  const TemporaryFolder folder;
  const Config config = small(folder);
  std::string message;
  try {
    run_ranks(2, {}, [&](Communicator& comm) {
      const CompareOptions options{.policies = {"none"}, .steps = 1 + comm.rank(), .rounds = 1};
      PolicyMeasurement(config, options, comm, [](std::string_view) {});
    });
  } catch (const UsageError& e) {
    message = e.what();
  }
  EXPECT_EQ(message, "the ranks were started with different options:\n  --steps: 1 on rank 0, 2 on rank 1");
}

TEST(Compare, AdaptersAgreeToo) {
  const TemporaryFolder folder;
  Config config = small(folder);
  config.model.lora.rank = 4;
  const Comparison c = compare(config, {.policies = {"none", "full", "segments"}, .steps = 2, .rounds = 1}, 2);
  EXPECT_TRUE(holds(c));
  for (const PolicyResult& p : c.policies) EXPECT_EQ(p.planned.total, p.measured.total) << p.policy;
}

TEST(Compare, PoliciesAreCheckedBeforeAnythingRuns) {
  const TemporaryFolder folder;
  const Config config = small(folder);
  const auto message = [&](const std::string& policy) {
    try {
      with_policy(config, policy);
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_NE(message("ful").find("did you mean full?"), std::string::npos);
  EXPECT_NE(message("best").find("allowed: none, full, every_n_layers, segments, "), std::string::npos);
  EXPECT_EQ(policy_of(with_policy(config, "segments")), "segments");
  EXPECT_EQ(default_policies(config), (std::vector<std::string>{"none", "full", "every_n_layers", "segments"}));
  Config layers = config;
  layers.activation_checkpointing.layers = {1};
  EXPECT_EQ(default_policies(with_policy(layers, "layers")).back(), "layers");
}

}  // namespace
}  // namespace regather::testing
