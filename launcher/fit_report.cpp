#include "launcher/fit_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "launcher/report_parts.h"

namespace regather {

using Json = nlohmann::ordered_json;

std::string_view name_of(FitSize what) { return what == FitSize::Sequence ? "sequence" : "micro_batch"; }

std::string_view name_of(FitBound bound) {
  return bound == FitBound::Memory ? "memory" : bound == FitBound::Text ? "text" : "search";
}

TextTable fit_table(const std::vector<PolicyFit>& fits, FitSize what, const Config& config) {
  TextTable table({what == FitSize::Sequence ? fmt::format("longest sequence, micro_batch {}", config.train.micro_batch)
                                             : fmt::format("largest micro_batch, sequence {}", config.data.sequence),
                   "fits", "bound by", "planned MiB", "measured MiB", "step s, predicted"});
  for (const PolicyFit& f : fits) {
    const FitAnswer& a = what == FitSize::Sequence ? f.sequence : f.micro_batch;
    table.row({"  " + f.policy, fmt::format("{}", a.largest), std::string(name_of(a.bound)),
               a.largest > 0 ? mebibytes(a.planned) : "-", a.measured > 0 ? mebibytes(a.measured) : "-",
               a.largest > 0 ? fmt::format("{:.3f}", a.seconds) : "-"});
    if (a.largest > 0 && !a.unconfirmed.empty() && a.unconfirmed != kNotAskedFor)
      table.heading("    not confirmed: " + a.unconfirmed);
  }
  return table;
}

std::string refusals(const std::vector<PolicyFit>& fits) {
  std::vector<std::string> lines;
  for (const PolicyFit& f : fits)
    for (const FitAnswer* a : {&f.sequence, &f.micro_batch}) {
      const std::string who = a->bound == FitBound::Memory ? f.policy + ", " : "";
      std::string line = fmt::format("  {}{} {} is refused: {}\n", who, name_of(a->what), a->largest + 1,
                                     a->refused.substr(0, a->refused.find('\n')));
      if (std::ranges::find(lines, line) == lines.end()) lines.push_back(std::move(line));
    }
  return fmt::format("{}", fmt::join(lines, ""));
}

std::string to_json(const std::vector<PolicyFit>& fits, const FitOptions& options, std::int64_t world) {
  const auto answer = [](const FitAnswer& a) {
    return Json{{"largest", a.largest},       {"bound_by", name_of(a.bound)},
                {"planned_bytes", a.planned}, {"measured_bytes", a.measured},
                {"step_seconds", a.seconds},  {"confirmed", a.largest > 0 && a.unconfirmed.empty() && a.confirmed()},
                {"one_more", a.refused}};
  };
  Json policies = Json::array();
  for (const PolicyFit& f : fits)
    policies.push_back(
        {{"policy", f.policy}, {"sequence", answer(f.sequence)}, {"micro_batch", answer(f.micro_batch)}});
  const Json json = {
      {"configuration", options.name}, {"world", world}, {"memory_bytes", options.memory}, {"policies", policies}};
  return json.dump(2) + "\n";
}

}  // namespace regather
