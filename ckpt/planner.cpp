#include "ckpt/planner.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <span>

#include "tensor/error.h"

namespace regather {

bool KeepFrontier::before(const State& a, const State& b) {
  if (a.bytes != b.bytes) return a.bytes < b.bytes;
  if (a.need != b.need) return a.need < b.need;
  if (a.seconds != b.seconds) return a.seconds < b.seconds;
  return a.choice != b.choice ? a.choice < b.choice : a.tail < b.tail;  // the same plan everywhere
}

// Sorts, and drops what needs as much memory as another state, and its first block as much, and is no faster.
void KeepFrontier::prune(std::vector<State>& states) {
  std::ranges::sort(states, before);
  std::map<std::int64_t, double> fastest;  // of those before: need -> seconds, which fall as it grows
  std::size_t n = 0;
  for (const State& s : states) {
    auto after = fastest.upper_bound(s.need);
    if (after != fastest.begin() && std::prev(after)->second <= s.seconds) continue;
    while (after != fastest.end() && after->second >= s.seconds) after = fastest.erase(after);
    fastest[s.need] = s.seconds;
    states[n++] = s;
  }
  states.resize(n);
}

// What prune leaves of both, in one pass. In each, bytes rise, and seconds fall where bytes are equal; nobody asks for
// needs.
std::vector<KeepFrontier::State> KeepFrontier::merge(const std::vector<State>& a, const std::vector<State>& b) {
  std::vector<State> both;
  both.reserve(a.size() + b.size());
  for (auto i = a.begin(), j = b.begin(); i != a.end() || j != b.end();) {
    const State& s = j == b.end() || (i != a.end() && before(*i, *j)) ? *i++ : *j++;
    if (!both.empty() && both.back().seconds <= s.seconds) continue;
    if (!both.empty() && both.back().bytes == s.bytes) both.pop_back();
    both.push_back(s);
  }
  return both;
}

// Of each stretch of bytes the smallest, the fastest, and the one whose first block needs least stay.
void KeepFrontier::thin(std::vector<State>& states, std::size_t most) {
  const bool needs = std::ranges::any_of(states, [](const State& s) { return s.need > 0; });
  const auto stretches = static_cast<double>(std::max<std::size_t>(1, most / (needs ? 3 : 2)));
  const double low = static_cast<double>(states.front().bytes),
               width = std::max(1.0, static_cast<double>(states.back().bytes) - low);
  const auto stretch = [&](const State& s) {
    return static_cast<std::int64_t>((static_cast<double>(s.bytes) - low) / width * stretches);
  };
  std::size_t kept = 0;
  for (std::size_t first = 0; first < states.size();) {
    std::size_t end = first + 1;
    while (end < states.size() && stretch(states[end]) == stretch(states[first])) ++end;
    const auto of = std::span(states).subspan(first, end - first);
    std::array<std::size_t, 3> stay = {
        first, first + static_cast<std::size_t>(std::ranges::min_element(of, {}, &State::seconds) - of.begin()),
        first + static_cast<std::size_t>(std::ranges::min_element(of, {}, &State::need) - of.begin())};
    std::ranges::sort(stay);
    const auto last = std::unique(stay.begin(), stay.end());
    for (auto i = stay.begin(); i != last; ++i) states[kept++] = states[*i];  // kept <= *i
    first = end;
  }
  states.resize(kept);
}

KeepFrontier::KeepFrontier(const KeepProblem& problem, std::size_t states) : states_(problem.blocks.size()) {
  check(!problem.blocks.empty(), "a plan needs blocks");
  const std::vector<State> end = {{problem.head, problem.head, 0, -1, 0}};
  const auto moves = [](const KeepChoice& c) { return c.moved > 0; };
  for (std::size_t b = problem.blocks.size(); b-- > 0;) {
    const std::vector<KeepChoice>& choices = problem.blocks[b];
    check(!choices.empty(), "block {} has nothing to choose from", b);
    const bool asked = b > 0 && std::ranges::any_of(problem.blocks[b - 1], moves);
    const bool needs = asked || std::ranges::any_of(choices, moves);
    const std::vector<State>& tails = b + 1 < problem.blocks.size() ? states_[b + 1] : end;
    std::vector<State>& here = states_[b];
    for (std::size_t c = 0; c < choices.size(); ++c) {
      const KeepChoice& choice = choices[c];
      std::vector<State> with_choice;
      with_choice.reserve(tails.size());
      for (std::size_t t = 0; t < tails.size(); ++t) {
        const std::int64_t beside_next = choice.moved > 0 ? choice.kept + choice.moved + tails[t].need : 0;
        with_choice.push_back({std::max({choice.need, choice.kept + tails[t].bytes, beside_next}),
                               asked ? choice.need : 0, choice.seconds + tails[t].seconds, static_cast<int>(c),
                               static_cast<std::uint32_t>(t)});
      }
      if (needs)
        here.insert(here.end(), with_choice.begin(), with_choice.end());
      else
        here = merge(here, with_choice);
    }
    if (needs) prune(here);
    if (here.size() > states) thin(here, states);
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
