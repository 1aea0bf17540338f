// What a block may keep and what each choice needs: found by running the block's own forward and backward without
// storage, once for every set of its marks. So there is no second listing of a block, and bytes are those of the tape
// itself. It chooses nothing (ckpt/planner.h does) and knows no ranks.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "tensor/block.h"
#include "tensor/recorder.h"

namespace regather {

// Bytes that a block needs beside what is there without it.
struct BlockBytes {
  std::int64_t kept = 0;                   // activations from its forward to its backward, its input included
  std::int64_t forward = 0, backward = 0;  // the most during each, `kept` included
};

struct KeepSet {
  SavePlan plan{};
  std::vector<std::string> keep{};  // marks of what waits for backward; empty: only the input
  BlockBytes activations{}, all{};  // of the kind Activations; of every kind
  double seconds = 0, flops = 0;    // that its backward runs again
  // What of it may wait in host memory: "input" or a mark, and the bytes that then leave the device. Asked for only.
  std::vector<std::pair<std::string, std::int64_t>> movable{};
};

// Some of a set's values that wait in host memory together.
struct Move {
  std::vector<std::string> names;
  std::int64_t bytes = 0;
};
// Sums of movable values: all of them; the largest that is at most `hidden`; and some in between, evenly spread.
std::vector<Move> moves_of(const KeepSet& set, std::int64_t hidden);
SavePlan with_move(SavePlan plan, const Move& move);

// Of one block.
struct BlockKeepSets {
  std::vector<KeepSet> sets;  // by kept bytes, at most those of `whole`; each is better in something than every other
  KeepSet nothing, whole;     // only the input; everything costly, as policy none and the last block do
};

// Seconds of an operation, from what the recorder says of it.
using Price = std::function<double(const Recorder::Interval&)>;

// Of each block, for tokens of shape [B, T]. Blocks that do the same share one search. order: of the plans.
// compute: elements of parameters and activations. device: what computes, which decides on workspace.
enum class Movable { NotAsked, Asked };
std::vector<BlockKeepSets> keep_sets(const Model& model, const Shape& tokens, Order order, const Price& price,
                                     Movable movable = Movable::NotAsked, DType compute = DType::F32,
                                     DeviceKind device = DeviceKind::Cpu);

// More marks than this are not combined freely: those that save most seconds a byte, alone, are.
inline constexpr std::size_t kMarksCombined = 12;
// Of a set's movable values so many, the largest, are combined; and so many of their sums are considered.
inline constexpr std::size_t kMovableCombined = 8, kMovesOfASet = 10;

}  // namespace regather
