// What runs in one optimizer step, in order: pure data, made before the step. It is interpreted by StackRunner, summed
// by the expected volume, and replayed without storage for memory. It knows no shard and no communicator.
#pragma once
#include <vector>

#include "dist/pass.h"

namespace regather {

// Which part of the model an action runs: a block by its index, or a root part.
inline constexpr int kEmbedding = -1, kHead = -2;

struct Action {
  Pass pass;  // Forward, Replay, Backward; the head's forward and backward are one Backward action under one lease
  int part;   // block index, kEmbedding or kHead
  int micro_batch;
  bool keep_input = true;  // Forward and Replay of a block: does its input survive this action?
  bool keep_activations =
      false;  // Forward of the last block: its backward comes before any other, so nothing costly is dropped
  bool operator==(const Action&) const = default;
};

// BatchMajor: one micro-batch after the other. LayerMajor: all micro-batches through a block before the next; backward
// visits them in reverse.
enum class AccumulationOrder { BatchMajor, LayerMajor };

// Where the blocks are cut into segments: the first block of each, ascending, beginning with 0. Forward keeps these
// blocks' inputs only, and all inputs of the last segment; before the backward of an earlier segment its other inputs
// are restored by replaying all of its blocks but the last. Empty: every block is a segment, every input is kept.
using SegmentStarts = std::vector<int>;
std::vector<Action> make_schedule(int blocks, int micro_batches, const SegmentStarts& starts, AccumulationOrder order);

// When units' gradients are reduced. EachMicroBatch: at the end of every backward. Once: at the unit's last backward of
// the step. In layer-major order, both: when the part has seen all its micro-batches.
enum class ReduceWhen { EachMicroBatch, Once };

// The units that hold each part's parameters.
struct PartUnits {
  std::vector<std::vector<int>> blocks;
  std::vector<int> embedding, head;
  const std::vector<int>& of(int part) const;
};
// Result[t]: the units whose gradients are reduced at the end of action t.
std::vector<std::vector<int>> plan_reductions(const std::vector<Action>& schedule, const PartUnits& units,
                                              ReduceWhen when, AccumulationOrder order);

}  // namespace regather
