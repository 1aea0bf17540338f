// Which name a person may have meant: the smallest number of inserted, removed, replaced or swapped letters, among the
// names of keys and what other programs call them.
#include <algorithm>
#include <cctype>
#include <tuple>

#include "launcher/config_units.h"
#include "launcher/config_value.h"

namespace regather {
namespace {

std::string normal(std::string_view name) {
  std::string text;
  for (const char c : name)
    text += c == '-' || c == ' ' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

std::size_t edits(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> cost(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = i + j;
        continue;
      }
      cost[i][j] =
          std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, cost[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
    }
  }
  return cost[a.size()][b.size()];
}

// Too far to be a slip of the hand.
std::size_t farthest(std::string_view name) {
  return name.size() <= 1 ? 0 : name.size() <= 3 ? 1 : name.size() <= 7 ? 2 : 3;
}

}  // namespace

std::string nearest(std::string_view name, const std::vector<std::string>& names) {
  const std::string wanted = normal(name);
  std::string best;
  std::size_t distance = farthest(wanted) + 1;
  for (const std::string& candidate : names) {
    const std::size_t d = edits(wanted, normal(candidate));
    if (d < distance) {
      distance = d;
      best = candidate;
    }
  }
  return best;
}

std::string suggestion(std::string_view path, const Keys& keys) {
  const std::string wanted = normal(last_part(path));
  const std::string_view section = path.substr(0, path.size() - last_part(path).size());
  // Each candidate with how far it is; at the same distance, what is in the section that the person wrote in comes
  // first.
  struct Candidate {
    std::size_t distance;
    bool elsewhere, other_name;
    std::string path;
    auto rank() const { return std::tuple(distance, elsewhere, other_name); }
  };
  std::vector<Candidate> candidates;
  const auto consider = [&](const std::string& candidate, std::string_view name, bool other_name) {
    const std::size_t d = edits(wanted, normal(name));
    if (d <= farthest(wanted))
      candidates.push_back({d, !candidate.starts_with(section) || section.empty(), other_name, candidate});
  };
  for (const Key& key : keys.keys()) {
    consider(key.path, last_part(key.path), false);
    for (const std::string& name : key.other_names) consider(key.path, name, true);
  }
  for (const KeySection& s : keys.sections()) consider(s.path, last_part(s.path), false);
  if (candidates.empty()) return "";
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.rank() < b.rank(); });
  std::vector<std::string> best;
  for (const Candidate& c : candidates) {
    const bool fresh = std::find(best.begin(), best.end(), c.path) == best.end();
    if (c.rank() == candidates[0].rank() && fresh && best.size() < 3) best.push_back(c.path);
  }
  return fmt::format("; did you mean {}?", fmt::join(best, " or "));
}

}  // namespace regather
