#include "launcher/profile_report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "launcher/text_table.h"

namespace regather {
namespace {

using Json = nlohmann::ordered_json;
using Activity = Recorder::Activity;

struct Section {
  Activity activity;
  std::string_view name;
};
// In the order of the table; the last holds what has no name.
constexpr std::array<Section, 9> kSections = {{{Activity::Forward, "forward"},
                                               {Activity::Recompute, "recompute"},
                                               {Activity::Backward, "backward"},
                                               {Activity::Update, "update"},
                                               {Activity::Copy, "copies"},
                                               {Activity::Communicate, "communication"},
                                               {Activity::Wait, "waiting"},
                                               {Activity::Rest, "rest"},
                                               {Activity::Scope, "other"}}};

Activity activity_named(std::string_view name) {
  for (const Section& s : kSections)
    if (s.name == name) return s.activity;
  throw Error(fmt::format("a profile has no part '{}'", name));
}

double ratio(double a, double b) { return b > 0 ? a / b : 0; }
std::string milliseconds(double seconds) { return fmt::format("{:.2f}", 1e3 * seconds); }
std::string percent(double share) { return fmt::format("{:.1f}%", 100 * share); }
std::string count(double calls) {  // steps may differ: what is in flight decides whether there is progress to make
  return calls == std::round(calls) ? fmt::format("{:.0f}", calls) : fmt::format("{:.1f}", calls);
}

std::string rate(const ProfileRow& row, const MachineLimits& limits) {
  if (row.seconds <= 0 || row.least_seconds <= 0) return "";
  return limited_by(row.work, limits) == LimitedBy::Flops
             ? fmt::format("{:.1f} GFLOP/s", 1e-9 * row.work.flops / row.seconds)
             : fmt::format("{:.1f} GB/s", 1e-9 * row.work.bytes / row.seconds);
}

std::vector<ProfileRow> rows_of(const RankProfile& p, Activity activity) {
  std::vector<ProfileRow> rows;
  for (const ProfileRow& row : p.rows)
    if (row.activity == activity) rows.push_back(row);
  std::ranges::sort(rows, std::ranges::greater{}, &ProfileRow::seconds);
  return rows;
}

TextTable operations_table(const RankProfile& p) {
  TextTable table({"operation", "calls a step", "ms a step", "share", "rate", "of limit"});
  for (const Section& section : kSections) {
    const std::vector<ProfileRow> rows = rows_of(p, section.activity);
    if (rows.empty()) continue;
    double sum = 0;
    for (const ProfileRow& row : rows) sum += row.seconds;
    table.row({std::string(section.name), "", milliseconds(sum), percent(ratio(sum, p.seconds))});
    if (section.activity == Activity::Scope || section.activity == Activity::Wait) continue;
    for (const ProfileRow& row : rows) {
      const std::string of_limit =
          row.least_seconds > 0 && row.seconds > 0 ? fmt::format("{:.0f}%", 100 * row.least_seconds / row.seconds) : "";
      table.row({"  " + row.name, count(row.calls), milliseconds(row.seconds), percent(ratio(row.seconds, p.seconds)),
                 rate(row, p.limits), of_limit});
    }
  }
  table.row({"all", "", milliseconds(p.seconds), percent(1)});
  return table;
}

TextTable collectives_table(const RankProfile& p) {
  TextTable table({"collective", "a step", "MiB", "ms in flight", "GB/s", "ms waited"});
  std::vector<CollectiveRow> rows = p.collectives;
  std::ranges::sort(rows, std::ranges::greater{}, &CollectiveRow::waited_seconds);
  CollectiveRow all;
  for (const CollectiveRow& row : rows) {
    const bool moves = row.bytes > 0 && row.flight_seconds > 0;
    table.row(
        {row.name, count(row.calls), fmt::format("{:.2f}", row.bytes / (1 << 20)), milliseconds(row.flight_seconds),
         moves ? fmt::format("{:.2f}", 1e-9 * row.bytes / row.flight_seconds) : "", milliseconds(row.waited_seconds)});
    all.calls += row.calls;
    all.bytes += row.bytes;
    all.waited_seconds += row.waited_seconds;
  }
  table.row({"all", count(all.calls), fmt::format("{:.2f}", all.bytes / (1 << 20)), "", "",
             milliseconds(all.waited_seconds)});
  return table;
}

std::string spread_over_ranks(const Profile& profile) {
  if (profile.ranks.size() < 2) return "";
  const auto busy = [](const RankProfile& p) { return p.seconds - waited_seconds(p); };
  const auto [least, most] = std::ranges::minmax(profile.ranks, {}, busy);
  return fmt::format("; without waiting, ranks take {:.1f} to {:.1f} ms", 1e3 * busy(least), 1e3 * busy(most));
}

Json limits_json(const MachineLimits& limits) {
  return {{"flops_per_second", limits.flops}, {"bytes_per_second", limits.bytes}};
}

Json rank_json(const RankProfile& p) {
  Json operations = Json::array(), collectives = Json::array();
  for (const Section& section : kSections) {
    for (const ProfileRow& row : rows_of(p, section.activity)) {
      operations.push_back({{"part", section.name},
                            {"name", row.name},
                            {"calls", row.calls},
                            {"seconds", row.seconds},
                            {"share", ratio(row.seconds, p.seconds)},
                            {"flops", row.work.flops},
                            {"bytes", row.work.bytes},
                            {"limit_seconds", row.least_seconds},
                            {"of_limit", ratio(row.least_seconds, row.seconds)}});
    }
  }
  for (const CollectiveRow& row : p.collectives) {
    collectives.push_back({{"name", row.name},
                           {"calls", row.calls},
                           {"bytes", row.bytes},
                           {"flight_seconds", row.flight_seconds},
                           {"bytes_per_second", ratio(row.bytes, row.flight_seconds)},
                           {"waited_seconds", row.waited_seconds}});
  }
  return {{"limits", limits_json(p.limits)},
          {"seconds", p.seconds},
          {"step_seconds", p.step_seconds},
          {"operations", operations},
          {"collectives", collectives}};
}

}  // namespace

std::string_view name_of(Activity activity) {
  for (const Section& s : kSections)
    if (s.activity == activity) return s.name;
  return "?";
}

std::string describe_limits(const MachineLimits& limits) {
  return fmt::format("{:.1f} GFLOP/s (matrix product), {:.1f} GB/s (memory), a rank when all run", 1e-9 * limits.flops,
                     1e-9 * limits.bytes);
}

std::string profile_tables(const Profile& profile) {
  const RankProfile mean = mean_of_ranks(profile);
  std::string text = fmt::format("\nprofile: {} steps after {} that warm up; means over {} rank{}\n", profile.steps,
                                 Profiler::kWarmUpSteps, profile.ranks.size(), profile.ranks.size() == 1 ? "" : "s");
  text += fmt::format("  a step takes {:.1f} ms, {:.1f} ms with data and report{}\n", 1e3 * mean.step_seconds,
                      1e3 * mean.seconds, spread_over_ranks(profile));
  text += fmt::format("  limits: {}\n\n", describe_limits(mean.limits));
  return text + operations_table(mean).text("  ") + "\n" + collectives_table(mean).text("  ");
}

std::string to_json(const Profile& profile) {
  Json ranks = Json::array();
  for (const RankProfile& p : profile.ranks) ranks.push_back(rank_json(p));
  const Json json = {{"world", profile.ranks.size()},
                     {"steps", profile.steps},
                     {"warm_up_steps", Profiler::kWarmUpSteps},
                     {"mean", rank_json(mean_of_ranks(profile))},
                     {"ranks", ranks}};
  return json.dump(2) + "\n";
}

std::string to_json(const RankProfile& profile) { return rank_json(profile).dump(); }

RankProfile rank_profile_from_json(const std::string& text) {
  const Json json = Json::parse(text);
  RankProfile p;
  p.limits = {json.at("limits").at("flops_per_second"), json.at("limits").at("bytes_per_second")};
  p.seconds = json.at("seconds");
  p.step_seconds = json.at("step_seconds");
  for (const Json& row : json.at("operations"))
    p.rows.push_back({activity_named(row.at("part").get<std::string>()),
                      row.at("name"),
                      row.at("calls"),
                      row.at("seconds"),
                      {row.at("flops"), row.at("bytes")},
                      row.at("limit_seconds")});
  for (const Json& row : json.at("collectives"))
    p.collectives.push_back(
        {row.at("name"), row.at("calls"), row.at("bytes"), row.at("flight_seconds"), row.at("waited_seconds")});
  return p;
}

}  // namespace regather
