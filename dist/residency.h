// Which action gathers, and which resident block gives up its slot for it: pure data, made before the step. Evicts the
// block whose next use is farthest away (Belady, "A study of replacement algorithms for a virtual-storage computer",
// 1966): nobody can need fewer gathers with as many slots. It knows no pass, no policy and no checkpoint.
#pragma once
#include <span>
#include <vector>

namespace regather {

inline constexpr int kNoBlock = -1;  // an action that uses no block; a slot that was free

struct Access {
  bool gathers = false;
  int evict = kNoBlock;
  bool operator==(const Access&) const = default;
};
// block_of_action: which block each action uses, or kNoBlock. 1 <= slots; more than `blocks` are not used.
std::vector<Access> plan_residency(std::span<const int> block_of_action, int blocks, int slots);

}  // namespace regather
