#include "dist/residency.h"

#include <algorithm>

#include "tensor/error.h"

namespace regather {

std::vector<Access> plan_residency(std::span<const int> block_of_action, int blocks, int slots) {
  check(slots >= 1, "at least one slot is needed, not {}", slots);
  const std::size_t end = block_of_action.size();
  std::vector<std::size_t> next_use(end);  // of the block that action t uses, after t
  std::vector<std::size_t> upcoming(static_cast<std::size_t>(blocks), end);
  for (std::size_t t = end; t-- > 0;) {
    const int block = block_of_action[t];
    if (block == kNoBlock) continue;
    next_use[t] = upcoming.at(static_cast<std::size_t>(block));
    upcoming[static_cast<std::size_t>(block)] = t;
  }

  std::vector<Access> plan(end);
  std::vector<int> resident;  // in order of arrival, so that ties are broken the same way everywhere
  for (std::size_t t = 0; t < end; ++t) {
    const int block = block_of_action[t];
    if (block == kNoBlock) continue;
    if (std::ranges::find(resident, block) == resident.end()) {
      plan[t].gathers = true;
      if (static_cast<int>(resident.size()) >= std::min(slots, blocks)) {
        const auto victim =
            std::ranges::max_element(resident, {}, [&](int b) { return upcoming[static_cast<std::size_t>(b)]; });
        plan[t].evict = *victim;
        resident.erase(victim);
      }
      resident.push_back(block);
    }
    upcoming[static_cast<std::size_t>(block)] = next_use[t];
  }
  return plan;
}

}  // namespace regather
