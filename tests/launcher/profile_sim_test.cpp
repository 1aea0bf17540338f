// `train --profile` with ranks as threads: what is recorded is what ran, adds up, and changes no number.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "launcher/profile.h"
#include "launcher/train.h"
#include "tests/launcher/temporary_folder.h"

namespace regather::testing {
namespace {

using Json = nlohmann::json;

constexpr int kLayers = 4, kRanks = 3, kSteps = 6;

Json read(const std::filesystem::path& file) {
  std::ifstream stream(file);
  return Json::parse(stream);
}

// A small model in training; the folder of the run.
std::filesystem::path train(const TemporaryFolder& folder, bool profile) {
  const std::filesystem::path text = folder.path() / "text", output = folder.path() / (profile ? "profiled" : "plain");
  std::ofstream stream(text);
  for (int i = 0; i < 400; ++i) stream << "the " << i * i << "th line\n";
  stream.close();
  const Config config =
      parse_config(fmt::format("model: {{layers: {}, hidden: 64, heads: 2, max_sequence: 64}}\n"
                               "data: {{files: [{}], sequence: 64}}\ntrain: {{steps: {}, micro_batch: 2}}\n"
                               "eval: {{every: 2, batches: 1}}\n"
                               "activation_checkpointing: {{policy: full}}\n"
                               "communication: {{backend: sim, sim_ranks: {}}}\noutput: {}\n",
                               kLayers, text.string(), kSteps, kRanks, output.string()),
                   "small.yaml", {});
  TrainOptions options;
  options.profile = profile;
  const int code =
      run_training(config, options, [](const Error& e, ErrorOrigin, const LaunchPlace&) { ADD_FAILURE() << e.what(); });
  EXPECT_EQ(code, 0);
  return output;
}

std::vector<Json> steps_of(const std::filesystem::path& run) {  // lines of metrics.jsonl
  std::vector<Json> steps;
  std::ifstream lines(run / "metrics.jsonl");
  for (std::string line; std::getline(lines, line);)
    if (const Json json = Json::parse(line); json.contains("loss")) steps.push_back(json);
  return steps;
}

using Counts = std::map<std::string, double>;
Counts calls(const Json& rank, const std::string& part) {
  Counts counts;
  for (const Json& row : rank["operations"])
    if (row["part"] == part) counts[row["name"]] = row["calls"];
  return counts;
}

void expect_rows_that_add_up_with_the_calls_of_the_plan(const std::filesystem::path& run) {
  const Json profile = read(run / "profile.json");
  EXPECT_EQ(profile["steps"], kSteps - Profiler::kWarmUpSteps);
  ASSERT_EQ(profile["ranks"].size(), static_cast<std::size_t>(kRanks));
  for (const Json& rank : profile["ranks"]) {
    double sum = 0;
    for (const Json& row : rank["operations"]) sum += row["seconds"].get<double>();
    EXPECT_NEAR(sum, rank["seconds"], 1e-9);
    EXPECT_LT(rank["step_seconds"], rank["seconds"]);
    EXPECT_GT(rank["step_seconds"], 0);
    const double L = kLayers, again = L - 1;  // the last block's backward comes next: what is cheap alone runs again
    EXPECT_EQ(calls(rank, "forward"), (Counts{{"embedding", 1},
                                              {"layer_norm", 2 * L + 1},
                                              {"linear", 4 * L},
                                              {"attention", L},
                                              {"gelu", L},
                                              {"add", 2 * L}}));
    // The block's last product and sum: their results are read by nobody.
    EXPECT_EQ(
        calls(rank, "recompute"),
        (Counts{{"layer_norm", 2 * L}, {"linear", 3 * again}, {"attention", again}, {"gelu", L}, {"add", again}}));
    EXPECT_EQ(calls(rank, "backward"), (Counts{{"embedding", 1},
                                               {"layer_norm", 2 * L + 1},
                                               {"linear", 4 * L},
                                               {"attention", L},
                                               {"gelu", L},
                                               {"add", 2 * L},
                                               {"linear_cross_entropy", 1}}));
    EXPECT_EQ(calls(rank, "update"), (Counts{{"adamw", 1}, {"gradient norm", 1}}));
  }
  // Rank 0's recorded steps are those of metrics.jsonl, but for what a busy machine does between two looks at the
  // clock.
  double seconds = 0;
  for (const Json& line : steps_of(run))
    if (line["step"] > Profiler::kWarmUpSteps) seconds += line["seconds"].get<double>();
  seconds /= kSteps - Profiler::kWarmUpSteps;
  EXPECT_NEAR(profile["ranks"][0]["step_seconds"], seconds, 0.1 + 0.05 * seconds);
}

void expect_the_collectives_of_the_ledger(const std::filesystem::path& run) {
  const Json profile = read(run / "profile.json"), summary = read(run / "summary.json");
  std::map<std::string, std::pair<double, double>> expected, found;
  for (const Json& c : summary["collectives"]["per_step"]) {
    const std::string name = fmt::format("{} of {} ({})", c["name"].get<std::string>(), c["unit"].get<std::string>(),
                                         c["pass"].get<std::string>());
    expected[name] = {c["count"], c["bytes"]};
  }
  for (const Json& c : profile["ranks"][0]["collectives"]) found[c["name"]] = {c["calls"], c["bytes"]};
  EXPECT_EQ(found, expected);
  double waited = 0;
  for (const Json& c : profile["ranks"][0]["collectives"]) waited += c["waited_seconds"].get<double>();
  for (const Json& row : profile["ranks"][0]["operations"])
    if (row["part"] == "waiting") {
      EXPECT_NEAR(row["seconds"], waited, 1e-9);
    }
}

void expect_the_same_numbers(const std::filesystem::path& profiled, const std::filesystem::path& plain) {
  const Json with = read(profiled / "summary.json"), without = read(plain / "summary.json");
  EXPECT_EQ(with["loss"], without["loss"]);
  EXPECT_EQ(with["grad_norm"], without["grad_norm"]);
  EXPECT_EQ(with["memory_bytes"]["peak"], without["memory_bytes"]["peak"]);
  EXPECT_EQ(with["collectives"], without["collectives"]);
  EXPECT_FALSE(std::filesystem::exists(plain / "trace.json"));
}

void expect_events_of_a_row_apart_or_one_inside_the_other(const Json& trace) {
  std::map<std::pair<int, int>, std::vector<std::pair<std::int64_t, std::int64_t>>> rows;
  std::map<std::pair<int, int>, std::string> names;
  const auto ns = [](const Json& us) { return std::llround(us.get<double>() * 1000); };
  for (const Json& e : trace["traceEvents"]) {
    const std::pair<int, int> row{e["pid"], e["tid"]};
    if (e["ph"] == "X") rows[row].emplace_back(ns(e["ts"]), ns(e["ts"]) + ns(e["dur"]));
    if (e["ph"] == "M" && e["name"] == "thread_name") names[row] = e["args"]["name"];
  }
  for (int rank = 0; rank < kRanks; ++rank)
    for (const char* name : {"compute", "copies", "communication"})
      EXPECT_TRUE(std::ranges::any_of(
          names, [&](const auto& n) { return n.first.first == rank && n.second == name && rows.contains(n.first); }))
          << "rank " << rank << " has nothing in " << name;
  for (auto& [row, events] : rows) {
    const bool nests = names.at(row) == "compute";
    std::ranges::sort(events,
                      [](auto a, auto b) { return a.first != b.first ? a.first < b.first : a.second > b.second; });
    std::vector<std::int64_t> open;  // ends of the events around the one looked at
    for (const auto& [begin, end] : events) {
      EXPECT_GE(begin, 0);
      while (!open.empty() && open.back() <= begin) open.pop_back();
      if (!open.empty()) {
        ASSERT_TRUE(nests) << names.at(row);
        ASSERT_LE(end, open.back());
      }
      open.push_back(end);
    }
  }
}

void expect_a_speed_without_the_first_step(const std::filesystem::path& run) {
  std::vector<double> seconds;
  std::int64_t tokens = 0;
  for (const Json& line : steps_of(run)) {
    if (line["step"] > 1) seconds.push_back(line["seconds"]);
    tokens = line["tokens"];
  }
  ASSERT_EQ(seconds.size(), static_cast<std::size_t>(kSteps - 1));
  const Json summary = read(run / "summary.json");
  EXPECT_EQ(summary["step_seconds"]["min"], *std::ranges::min_element(seconds));
  EXPECT_EQ(summary["step_seconds"]["max"], *std::ranges::max_element(seconds));
  std::ranges::sort(seconds);
  EXPECT_EQ(summary["step_seconds"]["median"], seconds[2]);
  EXPECT_DOUBLE_EQ(summary["tokens_per_second"], static_cast<double>(tokens) / seconds[2]);
}

// One training for all: measuring a machine's limits takes longer than the steps.
TEST(Profile, IsOfWhatRanAddsUpAndChangesNoNumber) {
  const TemporaryFolder folder;
  const std::filesystem::path profiled = train(folder, true), plain = train(folder, false);
  expect_rows_that_add_up_with_the_calls_of_the_plan(profiled);
  expect_the_collectives_of_the_ledger(profiled);
  expect_events_of_a_row_apart_or_one_inside_the_other(read(profiled / "trace.json"));
  expect_the_same_numbers(profiled, plain);
  expect_a_speed_without_the_first_step(plain);
}

}  // namespace
}  // namespace regather::testing
