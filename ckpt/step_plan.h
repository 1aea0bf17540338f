// A step as data: the schedule, and for every action what is gathered, what gives up its room, and what is reduced.
// Made before the step, interpreted by StackRunner, summed by expected_volume(). Pure: no device, no communicator.
#pragma once
#include <vector>

#include "ckpt/schedule.h"
#include "dist/ledger.h"
#include "dist/residency.h"
#include "dist/shard_unit.h"

namespace regather {

struct StepPlanOptions {
  int micro_batches = 1;     // M
  SegmentStarts segments{};  // empty: every block input is kept
  int slots = 2;             // D
  AccumulationOrder order = AccumulationOrder::BatchMajor;
  ReduceWhen reduce = ReduceWhen::EachMicroBatch;
  int offload_depth = 0;  // actions that a copy of offloaded values may take; 0: nothing is offloaded
};

struct StepPlan {
  struct Visit {
    int block, micro_batch;
    bool operator==(const Visit&) const = default;
  };
  struct Entry {
    Action action;
    std::vector<int> acquires{};      // units whose parameters it uses
    std::vector<int> gathers{};       // those of them that are not resident
    std::vector<int> evicts{};        // units that give up their room before the gathers
    bool evicts_for_good = false;     // no later action of the step uses them
    std::vector<int> evicts_after{};  // root units that the next action does not use
    std::vector<int> reduces{};       // units whose gradients are reduced at its end
    bool offloads = false;            // Forward of a block: there is time for its offloaded values to go and come back
    std::vector<Visit> fetches{};     // of those: what starts to come back before it
    std::vector<Visit> leaves{};      // of those: what gives back its device memory at its end
  };
  std::vector<Entry> entries;
  std::vector<int> reductions_of_unit;  // per step

  int block_gathers() const;  // gathers of block units
};

// Slots are shared by the blocks' units; root units are gathered where they are used and given back when the next
// action does not use them.
StepPlan make_step_plan(const PartUnits& units, int num_units, const StepPlanOptions& options);

// The communication of one step on one rank, from the plan alone.
struct UnitVolume {
  std::string ledger_name;
  std::int64_t trainable_shard = 0, frozen_shard = 0;  // elements
};
// compute: elements of what is gathered; reductions are fp32.
Ledger::Entries expected_volume(const StepPlan& plan, const std::vector<UnitVolume>& units, Strategy strategy,
                                int world, DType compute = DType::F32);

}  // namespace regather
