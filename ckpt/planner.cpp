#include "ckpt/planner.h"

#include <algorithm>

#include "tensor/error.h"

namespace regather {

// Sorts, and drops what needs as much memory as another state and is no faster.
void KeepFrontier::prune(std::vector<State>& states, std::size_t most) {
  std::ranges::sort(states, [](const State& a, const State& b) {
    if (a.bytes != b.bytes) return a.bytes < b.bytes;
    if (a.seconds != b.seconds) return a.seconds < b.seconds;
    return a.choice != b.choice ? a.choice < b.choice : a.tail < b.tail;  // the same plan everywhere
  });
  std::size_t n = 0;
  for (const State& s : states)
    if (n == 0 || s.seconds < states[n - 1].seconds) states[n++] = s;
  states.resize(n);
  if (n <= most) return;
  // Of each stretch of bytes the smallest and the fastest stay.
  const auto stretches = static_cast<double>(std::max<std::size_t>(1, most / 2));
  const double low = static_cast<double>(states.front().bytes), width = static_cast<double>(states.back().bytes) - low;
  const auto stretch = [&](const State& s) {
    return static_cast<std::int64_t>((static_cast<double>(s.bytes) - low) / width * stretches);
  };
  std::size_t kept = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const bool first = i == 0 || stretch(states[i - 1]) != stretch(states[i]);
    const bool last = i + 1 == n || stretch(states[i + 1]) != stretch(states[i]);
    if (first || last) states[kept++] = states[i];
  }
  states.resize(kept);
}

KeepFrontier::KeepFrontier(const KeepProblem& problem, std::size_t states) : states_(problem.blocks.size()) {
  check(!problem.blocks.empty(), "a plan needs blocks");
  const std::vector<State> end = {{problem.head, 0, -1, 0}};
  for (std::size_t b = problem.blocks.size(); b-- > 0;) {
    check(!problem.blocks[b].empty(), "block {} has nothing to choose from", b);
    const std::vector<State>& tails = b + 1 < problem.blocks.size() ? states_[b + 1] : end;
    std::vector<State>& here = states_[b];
    here.reserve(tails.size() * problem.blocks[b].size());
    for (std::size_t t = 0; t < tails.size(); ++t)
      for (std::size_t c = 0; c < problem.blocks[b].size(); ++c) {
        const KeepChoice& choice = problem.blocks[b][c];
        here.push_back({std::max(choice.need, choice.kept + tails[t].bytes), choice.seconds + tails[t].seconds,
                        static_cast<int>(c), static_cast<std::uint32_t>(t)});
      }
    prune(here, states);
    here.shrink_to_fit();
  }
  for (const State& s : states_.front()) points_.push_back({s.bytes, s.seconds});
}

std::optional<std::size_t> KeepFrontier::within(std::int64_t bytes) const {
  const auto above = std::ranges::upper_bound(points_, bytes, {}, &Point::bytes);
  if (above == points_.begin()) return std::nullopt;
  return static_cast<std::size_t>(above - points_.begin()) - 1;
}

std::vector<int> KeepFrontier::choices(std::size_t point) const {
  std::vector<int> chosen;
  std::size_t at = point;
  for (const std::vector<State>& of_block : states_) {
    const State& s = of_block.at(at);
    chosen.push_back(s.choice);
    at = s.tail;
  }
  return chosen;
}

std::optional<ResidentPlan> plan_slots(const KeepFrontier& frontier, const SlotProblem& slots, std::int64_t bytes) {
  std::optional<ResidentPlan> best;
  for (std::size_t d = 0; d < slots.seconds.size(); ++d) {
    const std::int64_t resident = slots.bytes_per_slot * static_cast<std::int64_t>(d + 1);
    const auto point = frontier.within(bytes - resident);
    if (!point) break;
    const KeepFrontier::Point& p = frontier.points()[*point];
    const double seconds = p.seconds + slots.seconds[d];
    if (!best || seconds < best->seconds)
      best = ResidentPlan{static_cast<int>(d) + 1, *point, p.bytes + resident, seconds};
  }
  return best;
}

}  // namespace regather
