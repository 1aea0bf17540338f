// The gathers and reductions of a step against closed forms, and, where there is none, against the best that any choice
// of evictions can do.
#include "ckpt/step_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tests/dist/optimal_gathers.h"

namespace regather {
namespace {

constexpr auto kBatchMajor = AccumulationOrder::BatchMajor, kLayerMajor = AccumulationOrder::LayerMajor;

// Unit 0: embedding; 1 .. L: blocks; L + 1: head. Tied: the head uses unit 0 as well.
PartUnits units_of(int blocks, bool tied = false) {
  PartUnits units{.blocks = {}, .embedding = {0}, .head = {blocks + 1}};
  for (int b = 0; b < blocks; ++b) units.blocks.push_back({b + 1});
  if (tied) units.head.push_back(0);
  return units;
}
StepPlan plan_of(int blocks, const StepPlanOptions& options, bool tied = false) {
  return make_step_plan(units_of(blocks, tied), blocks + 2, options);
}
int gathers_of(const StepPlan& plan, int unit) {
  int n = 0;
  for (const StepPlan::Entry& e : plan.entries) n += static_cast<int>(std::ranges::count(e.gathers, unit));
  return n;
}
SegmentStarts equal_segments(int segments, int size) {
  SegmentStarts starts;
  for (int s = 0; s < segments; ++s) starts.push_back(s * size);
  return starts;
}

// The blocks that a step uses, in order, written down from what segments are: forward; then for each segment from the
// back, unless it is the last, its blocks but one again; its blocks backward.
std::vector<int> uses_of(int blocks, int micro, const SegmentStarts& starts, AccumulationOrder order) {
  std::vector<int> one;
  for (int b = 0; b < blocks; ++b) one.push_back(b);
  for (int s = static_cast<int>(starts.size()) - 1; s >= 0; --s) {
    const int begin = starts[static_cast<std::size_t>(s)];
    const bool last = s + 1 == static_cast<int>(starts.size());
    const int end = last ? blocks : starts[static_cast<std::size_t>(s) + 1];
    if (!last)
      for (int b = begin; b < end - 1; ++b) one.push_back(b);
    for (int b = end - 1; b >= begin; --b) one.push_back(b);
  }
  std::vector<int> all;
  if (order == kLayerMajor) {
    for (const int b : one) all.insert(all.end(), static_cast<std::size_t>(micro), b);
  } else {
    for (int m = 0; m < micro; ++m) all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

TEST(StepPlan, GathersWithEveryInputKept) {  // L + (2M-1)(L-D)
  for (int L = 4; L <= 8; ++L)
    for (int M = 1; M <= 3; ++M)
      for (int D = 1; D <= L; ++D) {
        const int expected = L + (2 * M - 1) * (L - D);
        EXPECT_EQ(plan_of(L, {.micro_batches = M, .slots = D}).block_gathers(), expected) << L << ' ' << M << ' ' << D;
        EXPECT_EQ(plan_of(L, {.micro_batches = M, .segments = equal_segments(L, 1), .slots = D}).block_gathers(),
                  expected);
      }
}

TEST(StepPlan, GathersWithEqualSegments) {
  for (int S = 1; S <= 5; ++S)
    for (int K = 1; K <= 5; ++K)
      for (int M = 1; M <= 3; ++M)
        for (int D = 1; D <= S * K; ++D) {
          const int L = S * K;
          const int short_segments = L + (2 * M - 1) * (L - D);
          const int long_segments = L + (M - 1) * (L - D) + M * ((K - D) + (S - 1) * (2 * K - D));
          if (D == K) {
            EXPECT_EQ(short_segments, long_segments);
          }
          EXPECT_EQ(plan_of(L, {.micro_batches = M, .segments = equal_segments(S, K), .slots = D}).block_gathers(),
                    K <= D ? short_segments : long_segments)
              << S << " segments of " << K << ", M " << M << ", D " << D;
        }
}

TEST(StepPlan, GathersAreTheFewestPossibleForAnySegments) {
  for (int L = 2; L <= 7; ++L)
    for (unsigned cuts = 0; cuts < 1U << (L - 1); ++cuts) {
      SegmentStarts starts{0};
      for (int b = 1; b < L; ++b)
        if ((cuts >> (b - 1)) & 1U) starts.push_back(b);
      for (int M = 1; M <= 2; ++M)
        for (int D = 1; D <= L; ++D)
          for (const auto order : {kBatchMajor, kLayerMajor})
            EXPECT_EQ(plan_of(L, {.micro_batches = M, .segments = starts, .slots = D, .order = order}).block_gathers(),
                      optimal_gathers(uses_of(L, M, starts, order), D))
                << L << " blocks, cuts " << cuts << ", M " << M << ", D " << D;
    }
}

TEST(StepPlan, LayerMajorGathersAsOneMicroBatchDoes) {
  for (int L = 4; L <= 8; ++L)
    for (int D = 1; D <= L; ++D) {
      EXPECT_EQ(plan_of(L, {.micro_batches = 3, .slots = D, .order = kLayerMajor}).block_gathers(), 2 * L - D);
      for (const SegmentStarts& starts : {equal_segments(2, L / 2), SegmentStarts{0, 1, 3}, SegmentStarts{0}}) {
        const int one = plan_of(L, {.micro_batches = 1, .segments = starts, .slots = D}).block_gathers();
        for (int M = 1; M <= 3; ++M)
          EXPECT_EQ(
              plan_of(L, {.micro_batches = M, .segments = starts, .slots = D, .order = kLayerMajor}).block_gathers(),
              one);
      }
    }
}

TEST(StepPlan, MoreSlotsThanBlocksChangeNothing) {
  EXPECT_EQ(plan_of(4, {.micro_batches = 3, .slots = 100}).block_gathers(), 4);
}

TEST(StepPlan, ReductionsPerUnitAndStep) {
  for (int M = 1; M <= 3; ++M) {
    const auto blocks = [](const StepPlan& plan) {
      return std::vector(plan.reductions_of_unit.begin() + 1, plan.reductions_of_unit.end() - 1);
    };
    EXPECT_EQ(blocks(plan_of(5, {.micro_batches = M})), std::vector(5, M));
    EXPECT_EQ(blocks(plan_of(5, {.micro_batches = M, .reduce = ReduceWhen::Once})), std::vector(5, 1));
    EXPECT_EQ(blocks(plan_of(5, {.micro_batches = M, .order = kLayerMajor})), std::vector(5, 1));
    EXPECT_EQ(plan_of(5, {.micro_batches = M}, true).reductions_of_unit[0], 2 * M);
    EXPECT_EQ(plan_of(5, {.micro_batches = M, .order = kLayerMajor}, true).reductions_of_unit[0], 2);
  }
}

// A tied table: for the lookup, and for the head, whose forward and backward share one lease. Never for its own
// backward.
TEST(StepPlan, RootUnitsAreGatheredOncePerUse) {
  for (const bool tied : {false, true})
    for (int M = 1; M <= 3; ++M) {
      const StepPlan batch = plan_of(4, {.micro_batches = M}, tied),
                     layer = plan_of(4, {.micro_batches = M, .order = kLayerMajor}, tied);
      EXPECT_EQ(gathers_of(batch, 0), tied ? 2 * M : M);
      EXPECT_EQ(gathers_of(batch, 5), M);
      EXPECT_EQ(gathers_of(layer, 0), tied ? 2 : 1) << "all micro-batches under one gather";
      EXPECT_EQ(gathers_of(layer, 5), 1);
    }
}

// Carried out: what an action uses is there, blocks never have more room than their slots, root units none that they do
// not use.
TEST(StepPlan, WhatAnActionUsesIsThereAndNothingElseOfTheRoot) {
  for (const bool tied : {false, true})
    for (const auto order : {kBatchMajor, kLayerMajor})
      for (const SegmentStarts& starts : {SegmentStarts{}, SegmentStarts{0, 2}, SegmentStarts{0, 1, 4}})
        for (int D = 1; D <= 5; ++D) {
          const StepPlan plan = plan_of(5, {.micro_batches = 2, .segments = starts, .slots = D, .order = order}, tied);
          std::set<int> resident;
          const auto is_root = [](int unit) { return unit == 0 || unit == 6; };
          for (const StepPlan::Entry& e : plan.entries) {
            for (const int unit : e.evicts) EXPECT_EQ(resident.erase(unit), 1U);
            for (const int unit : e.gathers) EXPECT_TRUE(resident.insert(unit).second) << "gathered twice";
            for (const int unit : e.acquires) EXPECT_TRUE(resident.contains(unit));
            EXPECT_LE(std::ranges::count_if(resident, [&](int u) { return !is_root(u); }), D);
            for (const int unit : resident)
              if (is_root(unit)) {
                EXPECT_EQ(std::ranges::count(e.acquires, unit), 1);
              }
            for (const int unit : e.evicts_after) EXPECT_EQ(resident.erase(unit), 1U);
            if (e.action.part == kEmbedding && e.action.pass == Pass::Backward) {
              EXPECT_TRUE(e.acquires.empty());
            }
          }
        }
}

// ---- volume ---------------------------------------------------------------------------------------------------------

// 4 blocks of 100 + 7 (frozen) elements a shard, an embedding of 31, a head without a trainable parameter.
std::vector<UnitVolume> volumes() {
  return {{"wte", 31, 0}, {"block", 100, 7}, {"block", 100, 7}, {"block", 100, 7}, {"block", 100, 7}, {"head", 0, 5}};
}
LedgerCounts counts(std::int64_t n, std::int64_t shard, std::int64_t world, std::int64_t crossings = 1) {
  return {.count = n, .logical_bytes = n * shard * 4 * world, .wire_bytes = n * shard * 4 * (world - 1) * crossings};
}
void expect_same(const Ledger::Entries& measured, const Ledger::Entries& expected) {
  for (const std::string& line : differences(expected, measured)) ADD_FAILURE() << line;
}

LedgerKey gather(const char* unit, Pass pass) { return {Collective::AllGather, unit, pass, DType::F32}; }
LedgerKey scatter(const char* unit) { return {Collective::ReduceScatter, unit, Pass::Backward, DType::F32}; }

TEST(ExpectedVolume, FullShardingGathersAndScatters) {
  for (int world = 1; world <= 4; ++world)
    for (int M = 1; M <= 3; ++M)
      for (int D = 1; D <= 4; ++D) {
        Ledger::Entries expected{// The first forward gathers every block; later passes those that found no slot.
                                 {gather("block", Pass::Forward), counts(4 + (M - 1) * (4 - D), 107, world)},
                                 {gather("block", Pass::Backward), counts(M * (4 - D), 107, world)},
                                 {gather("wte", Pass::Forward), counts(M, 31, world)},
                                 {gather("head", Pass::Backward), counts(M, 5, world)},
                                 {scatter("block"), counts(4 * M, 100, world)},
                                 {scatter("wte"), counts(M, 31, world)}};  // the head is frozen: nothing to reduce
        std::erase_if(expected, [](const auto& entry) { return entry.second.count == 0; });
        expect_same(expected_volume(plan_of(4, {.micro_batches = M, .slots = D}), volumes(), Strategy::Full, world),
                    expected);
      }
}

TEST(ExpectedVolume, ReplicatedParametersAreRefreshedByTheOptimizer) {
  for (const Strategy strategy : {Strategy::Gradients, Strategy::Optimizer})
    for (int M = 1; M <= 3; ++M)
      expect_same(expected_volume(plan_of(4, {.micro_batches = M}), volumes(), strategy, 3),
                  {{gather("block", Pass::Optimizer), counts(4, 100, 3)},  // frozen values do not change
                   {gather("wte", Pass::Optimizer), counts(1, 31, 3)},
                   {scatter("block"), counts(4 * M, 100, 3)},
                   {scatter("wte"), counts(M, 31, 3)}});
}

TEST(ExpectedVolume, DataParallelOnlyReduces) {
  expect_same(
      expected_volume(plan_of(4, {.micro_batches = 2, .reduce = ReduceWhen::Once}), volumes(), Strategy::None, 3),
      {{{Collective::AllReduce, "block", Pass::Backward, DType::F32}, counts(4, 100, 3, 2)},
       {{Collective::AllReduce, "wte", Pass::Backward, DType::F32}, counts(1, 31, 3, 2)}});
}

TEST(ExpectedVolume, ReplaysAreGatheredInTheirOwnPass) {  // 2 segments of 2, one slot: L + (K-D) + (S-1)(2K-D)
  const StepPlan plan = plan_of(4, {.segments = {0, 2}, .slots = 1});
  const Ledger::Entries volume = expected_volume(plan, volumes(), Strategy::Full, 2);
  EXPECT_EQ(volume.at(gather("block", Pass::Forward)).count, 4);
  EXPECT_EQ(volume.at(gather("block", Pass::Replay)).count, 1);
  EXPECT_EQ(volume.at(gather("block", Pass::Backward)).count, 1 + 2);
}

// By action: which blocks give back their device memory after it, and start to come back before it.
TEST(StepPlan, OffloadedValuesLeaveAndComeBackAsManyActionsFromTheirUse) {
  using Blocks = std::vector<int>;
  const auto visits = [](const StepPlanOptions& options, bool leaves) {
    std::vector<Blocks> all;
    for (const StepPlan::Entry& e : plan_of(4, options).entries) {
      Blocks& blocks = all.emplace_back();
      for (const StepPlan::Visit& v : leaves ? e.leaves : e.fetches) blocks.push_back(v.block);
    }
    return all;
  };
  // embedding, blocks 0 to 3, head, blocks 3 to 0, embedding. The last block's backward comes next: it moves nothing.
  EXPECT_EQ(visits({.offload_depth = 1}, true), (std::vector<Blocks>{{}, {}, {0}, {1}, {2}, {}, {}, {}, {}, {}, {}}));
  EXPECT_EQ(visits({.offload_depth = 1}, false), (std::vector<Blocks>{{}, {}, {}, {}, {}, {}, {2}, {1}, {0}, {}, {}}));
  EXPECT_EQ(visits({.offload_depth = 2}, true), (std::vector<Blocks>{{}, {}, {}, {0}, {1}, {}, {}, {}, {}, {}, {}}));
  EXPECT_EQ(visits({.offload_depth = 2}, false), (std::vector<Blocks>{{}, {}, {}, {}, {}, {}, {1}, {0}, {}, {}, {}}));
  EXPECT_EQ(visits({}, true), std::vector<Blocks>(11));
}

TEST(StepPlan, WhatIsOffloadedLeavesOnceAndComesBackOnceBeforeItIsUsed) {
  for (const auto order : {kBatchMajor, kLayerMajor})
    for (const auto& segments : {SegmentStarts{}, SegmentStarts{0, 3}})
      for (const int depth : {1, 2, 4})
        for (const int micro : {1, 3}) {
          const StepPlan plan =
              plan_of(6, {.micro_batches = micro, .segments = segments, .order = order, .offload_depth = depth});
          std::set<std::pair<int, int>> stored, away;
          for (const StepPlan::Entry& e : plan.entries) {
            const auto visit = std::pair(e.action.part, e.action.micro_batch);
            for (const auto& v : e.fetches) EXPECT_EQ(away.erase({v.block, v.micro_batch}), 1U);
            EXPECT_FALSE(away.contains(visit));
            if (e.offloads) {
              EXPECT_TRUE(stored.insert(visit).second && e.action.keep_input);
            }
            for (const auto& v : e.leaves) {
              EXPECT_EQ(stored.erase({v.block, v.micro_batch}), 1U);
              away.insert({v.block, v.micro_batch});
            }
          }
          EXPECT_TRUE(stored.empty() && away.empty());
        }
}

}  // namespace
}  // namespace regather
