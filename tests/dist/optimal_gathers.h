// The fewest gathers that any choice of evictions can reach, by looking at all of them. It shares nothing with what it
// checks: no rule of replacement, only "a block is there when it is used, and no more than `slots` are".
#pragma once
#include <bit>
#include <cstdint>
#include <map>
#include <span>

namespace regather {

// uses: which block each action uses; negative: none. Blocks are below 32.
inline int optimal_gathers(std::span<const int> uses, int slots) {
  std::map<std::uint32_t, int> best{{0, 0}};  // resident set -> fewest gathers that lead to it
  for (const int block : uses) {
    if (block < 0) continue;
    const std::uint32_t bit = 1U << block;
    std::map<std::uint32_t, int> next;
    const auto reach = [&](std::uint32_t set, int gathers) {
      const auto [at, fresh] = next.try_emplace(set, gathers);
      if (!fresh && gathers < at->second) at->second = gathers;
    };
    for (const auto& [set, gathers] : best) {
      if (set & bit) {
        reach(set, gathers);
      } else if (std::popcount(set) < slots) {
        reach(set | bit, gathers + 1);
      } else {
        for (std::uint32_t rest = set; rest != 0; rest &= rest - 1)
          reach((set & ~(rest & -rest)) | bit, gathers + 1);  // without the lowest of `rest`
      }
    }
    best = std::move(next);
  }
  int fewest = best.begin()->second;
  for (const auto& [set, gathers] : best) fewest = gathers < fewest ? gathers : fewest;
  return fewest;
}

}  // namespace regather
