#include "ckpt/step_plan.h"

#include <algorithm>
#include <ranges>

#include "tensor/error.h"

namespace regather {
namespace {

bool contains(const std::vector<int>& units, int unit) { return std::ranges::find(units, unit) != units.end(); }

// The embedding's backward reads no parameter; every other action reads those of its part.
std::vector<int> used_by(const Action& a, const PartUnits& units) {
  if (a.part == kEmbedding && a.pass == Pass::Backward) return {};
  return units.of(a.part);
}

// A unit that is used again leaves its 1-D parameters behind when it is evicted.
void find_last_evictions(StepPlan& plan) {
  std::vector<bool> used(plan.reductions_of_unit.size());  // from this entry on
  for (StepPlan::Entry& e : std::views::reverse(plan.entries)) {
    for (int unit : e.acquires) used[static_cast<std::size_t>(unit)] = true;
    e.evicts_for_good = std::ranges::none_of(e.evicts, [&](int unit) { return used[static_cast<std::size_t>(unit)]; });
  }
}

// What a forward offloads leaves the device `depth` actions later, and starts back as many before it is used. Where the
// one would not come before the other, nothing is moved: that is what backward needs first.
void plan_offload(StepPlan& plan, int depth) {
  auto& entries = plan.entries;
  const auto ahead = static_cast<std::size_t>(depth);
  for (std::size_t t = 0; t < entries.size(); ++t) {
    const Action& a = entries[t].action;
    if (a.pass != Pass::Forward || a.part < 0 || a.keep_activations || !a.keep_input) continue;
    std::size_t use = t + 1;
    while (entries[use].action.part != a.part || entries[use].action.micro_batch != a.micro_batch) ++use;
    if (t + ahead + ahead >= use) continue;
    entries[t].offloads = true;
    entries[t + ahead].leaves.push_back({a.part, a.micro_batch});
    entries[use - ahead].fetches.push_back({a.part, a.micro_batch});
  }
}

}  // namespace

StepPlan make_step_plan(const PartUnits& units, int num_units, const StepPlanOptions& options) {
  const int blocks = static_cast<int>(units.blocks.size());
  const auto schedule = make_schedule(blocks, options.micro_batches, options.segments, options.order);
  const auto reductions = plan_reductions(schedule, units, options.reduce, options.order);
  std::vector<int> block_of_action;
  for (const Action& a : schedule) block_of_action.push_back(a.part >= 0 ? a.part : kNoBlock);
  const auto residency = plan_residency(block_of_action, blocks, options.slots);

  StepPlan plan;
  plan.reductions_of_unit.assign(static_cast<std::size_t>(num_units), 0);
  std::vector<int> resident_roots;
  for (std::size_t t = 0; t < schedule.size(); ++t) {
    StepPlan::Entry e{.action = schedule[t], .acquires = used_by(schedule[t], units), .reduces = reductions[t]};
    if (e.action.part >= 0) {
      if (residency[t].gathers) e.gathers = e.acquires;
      if (residency[t].evict != kNoBlock) e.evicts = units.blocks[static_cast<std::size_t>(residency[t].evict)];
    } else {
      const std::vector<int> next = t + 1 < schedule.size() ? used_by(schedule[t + 1], units) : std::vector<int>();
      for (int unit : e.acquires) {
        if (!contains(resident_roots, unit)) e.gathers.push_back(unit);
        if (!contains(next, unit)) e.evicts_after.push_back(unit);
      }
      resident_roots.clear();
      for (int unit : e.acquires)
        if (contains(next, unit)) resident_roots.push_back(unit);
    }
    for (int unit : e.reduces) ++plan.reductions_of_unit[static_cast<std::size_t>(unit)];
    plan.entries.push_back(std::move(e));
  }
  find_last_evictions(plan);
  if (options.offload_depth > 0) plan_offload(plan, options.offload_depth);
  return plan;
}

int StepPlan::block_gathers() const {
  int n = 0;
  for (const Entry& e : entries)
    if (e.action.part >= 0) n += static_cast<int>(e.gathers.size());
  return n;
}

Ledger::Entries expected_volume(const StepPlan& plan, const std::vector<UnitVolume>& units, Strategy strategy,
                                int world, DType compute) {
  Ledger ledger;
  const auto add = [&](Collective collective, int unit, Pass pass, std::int64_t shard, int crossings) {
    const DType type = collective == Collective::AllGather ? compute : DType::F32;
    const std::int64_t bytes = shard * static_cast<std::int64_t>(size_of(type));
    ledger.add({collective, units.at(static_cast<std::size_t>(unit)).ledger_name, pass, type},
               {.count = 1, .logical_bytes = bytes * world, .wire_bytes = bytes * (world - 1) * crossings});
  };
  for (const StepPlan::Entry& e : plan.entries) {
    if (strategy == Strategy::Full)
      for (int u : e.gathers) {
        const UnitVolume& unit = units.at(static_cast<std::size_t>(u));
        add(Collective::AllGather, u, e.action.pass, unit.trainable_shard + unit.frozen_shard, 1);
      }
    for (int u : e.reduces) {
      const std::int64_t shard = units.at(static_cast<std::size_t>(u)).trainable_shard;
      if (shard == 0) continue;
      if (strategy == Strategy::None)
        add(Collective::AllReduce, u, Pass::Backward, shard, 2);  // a reduce-scatter and an all-gather
      else
        add(Collective::ReduceScatter, u, Pass::Backward, shard, 1);
    }
  }
  if (strategy == Strategy::Gradients || strategy == Strategy::Optimizer)
    for (int u = 0; u < static_cast<int>(units.size()); ++u)
      if (units[static_cast<std::size_t>(u)].trainable_shard > 0)
        add(Collective::AllGather, u, Pass::Optimizer, units[static_cast<std::size_t>(u)].trainable_shard, 1);
  return ledger.entries();
}

}  // namespace regather
