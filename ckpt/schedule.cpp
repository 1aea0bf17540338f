#include "ckpt/schedule.h"

#include <algorithm>
#include <numeric>

#include "tensor/error.h"

namespace regather {
namespace {

std::vector<Action> one_micro_batch(int blocks, const SegmentStarts& starts) {
  const int last_segment = starts.back();
  std::vector<Action> out;
  out.push_back({.pass = Pass::Forward, .part = kEmbedding, .micro_batch = 0});
  for (int b = 0; b < blocks; ++b)
    out.push_back({.pass = Pass::Forward,
                   .part = b,
                   .micro_batch = 0,
                   .keep_input = std::ranges::binary_search(starts, b) || b >= last_segment,
                   .keep_activations = b == blocks - 1});
  out.push_back({.pass = Pass::Backward, .part = kHead, .micro_batch = 0});
  for (std::size_t s = starts.size(); s-- > 0;) {
    const int first = starts[s], end = s + 1 < starts.size() ? starts[s + 1] : blocks;
    for (int b = first; first != last_segment && b + 1 < end; ++b)
      out.push_back({.pass = Pass::Replay, .part = b, .micro_batch = 0});
    for (int b = end; b-- > first;) out.push_back({.pass = Pass::Backward, .part = b, .micro_batch = 0});
  }
  out.push_back({.pass = Pass::Backward, .part = kEmbedding, .micro_batch = 0});
  return out;
}

}  // namespace

std::vector<Action> make_schedule(int blocks, int micro_batches, const SegmentStarts& starts, AccumulationOrder order) {
  check(blocks >= 1 && micro_batches >= 1, "a schedule needs blocks and micro-batches, not {} and {}", blocks,
        micro_batches);
  SegmentStarts every(static_cast<std::size_t>(blocks));
  std::iota(every.begin(), every.end(), 0);
  check(
      starts.empty() || (starts[0] == 0 && starts.back() < blocks && std::ranges::is_sorted(starts, std::less_equal{})),
      "segments begin at block 0 and at ascending blocks below {}", blocks);
  const std::vector<Action> one = one_micro_batch(blocks, starts.empty() ? every : starts);
  std::vector<Action> all;
  const auto add = [&](Action a, int m) {
    a.micro_batch = m;
    all.push_back(a);
  };
  if (order == AccumulationOrder::BatchMajor) {
    for (int m = 0; m < micro_batches; ++m)
      for (const Action& a : one) add(a, m);
    return all;
  }
  for (const Action& each : one)
    for (int i = 0; i < micro_batches; ++i) {
      Action a = each;
      const int m = a.pass == Pass::Backward ? micro_batches - 1 - i : i;
      a.keep_activations = each.keep_activations && m == micro_batches - 1;  // the one whose backward comes first
      add(a, m);
    }
  return all;
}

const std::vector<int>& PartUnits::of(int part) const {
  return part == kEmbedding ? embedding : part == kHead ? head : blocks.at(static_cast<std::size_t>(part));
}

std::vector<std::vector<int>> plan_reductions(const std::vector<Action>& schedule, const PartUnits& units,
                                              ReduceWhen when, AccumulationOrder order) {
  std::vector<std::vector<int>> plan(schedule.size());
  std::vector<int> done;  // units whose last backward was met, walking from the end
  for (std::size_t t = schedule.size(); t-- > 0;) {
    const Action& a = schedule[t];
    if (a.pass != Pass::Backward) continue;
    const bool part_ends = t + 1 == schedule.size() || schedule[t + 1].part != a.part || schedule[t + 1].pass != a.pass;
    for (int unit : units.of(a.part)) {
      const bool unit_ends = std::ranges::find(done, unit) == done.end();
      if (unit_ends) done.push_back(unit);
      const bool reduces = order == AccumulationOrder::LayerMajor ? part_ends
                           : when == ReduceWhen::EachMicroBatch   ? true
                                                                  : unit_ends;
      if (reduces) plan[t].push_back(unit);
    }
  }
  return plan;
}

}  // namespace regather
