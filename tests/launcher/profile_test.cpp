// A profile as texts and as a trace, from plain numbers.
#include "launcher/profile.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "launcher/profile_report.h"
#include "launcher/trace_file.h"

namespace regather {
namespace {

using Activity = Recorder::Activity;
using Json = nlohmann::json;
using namespace std::chrono_literals;

RankProfile example(double seconds) {
  RankProfile p;
  p.limits = {.flops = 50e9, .bytes = 10e9};
  p.seconds = seconds;
  p.step_seconds = seconds - 0.002;
  p.rows = {{Activity::Forward, "linear", 24, 0.100, {.flops = 4e9, .bytes = 1e8}, 0.080},
            {Activity::Recompute, "linear", 20, 0.080, {.flops = 3e9, .bytes = 1e8}, 0.060},
            {Activity::Backward, "layer_norm", 12, 0.020, {.flops = 0, .bytes = 1e8}, 0.010},
            {Activity::Wait, "waiting", 14, seconds - 0.210, {}, 0},
            {Activity::Scope, "other", 9, 0.010, {}, 0}};
  p.collectives = {{"all_gather of block (forward)", 6, 1 << 20, 0.002, 0.001}};
  return p;
}

TEST(Profile, TheTableSaysRateAndShareOfTheLimit) {
  const std::string text = profile_tables({.steps = 8, .ranks = {example(0.250), example(0.350)}});
  const auto has = [&](const std::string& line) { return text.find(line) != std::string::npos; };
  EXPECT_TRUE(has("8 steps after 2 that warm up; means over 2 ranks")) << text;
  EXPECT_TRUE(has("300.0 ms with data and report")) << text;
  EXPECT_TRUE(has("ranks take 210.0 to 210.0 ms")) << text;
  EXPECT_TRUE(has("100.00   33.3%  40.0 GFLOP/s       80%")) << text;
  EXPECT_TRUE(has("5.0 GB/s")) << text;
  EXPECT_TRUE(has("0.52")) << text;  // GB/s of the all-gather
  EXPECT_LT(text.find("forward"), text.find("recompute"));
  EXPECT_LT(text.find("recompute"), text.find("backward"));
}

TEST(Profile, JsonBringsARanksNumbersBackAndMeansAreOfAllRanks) {
  const RankProfile p = example(0.250), back = rank_profile_from_json(to_json(p));
  ASSERT_EQ(back.rows.size(), p.rows.size());
  EXPECT_EQ(to_json(back), to_json(p));
  const Json json = Json::parse(to_json(Profile{.steps = 8, .ranks = {example(0.250), example(0.350)}}));
  EXPECT_EQ(json["steps"], 8);
  EXPECT_EQ(json["ranks"].size(), 2U);
  EXPECT_DOUBLE_EQ(json["mean"]["seconds"], 0.300);
  double sum = 0;
  for (const Json& row : json["mean"]["operations"]) sum += row["seconds"].get<double>();
  EXPECT_DOUBLE_EQ(sum, 0.300);
}

TEST(TraceFile, CollectivesThatFlyTogetherHaveRowsOfTheirOwn) {
  Recorder::Recording recording;
  recording.intervals = {
      {.activity = Activity::Scope, .name = "step", .detail = "3", .begin = 10us, .length = 90us},
      {.activity = Activity::Forward, .name = "a \"name\"", .parent = 0, .begin = 20us, .length = 5us},
      {.activity = Activity::Copy, .name = "copy", .parent = 0, .begin = 30001ns, .length = 2ns}};
  recording.flights = {{"second", "", 8, 50us, 10us}, {"first", "", 8, 45us, 20us}, {"third", "", 8, 65us, 5us}};
  const std::string events = trace_events(1, std::span(&recording, 1), 5us);
  const Json json = Json::parse(trace_file(std::vector<std::string>{events}));
  std::map<std::string, Json> by_name;
  std::map<int, std::string> rows;
  for (const Json& e : json["traceEvents"]) {
    EXPECT_EQ(e["pid"], 1);
    if (e["ph"] == "X") by_name[e["name"]] = e;
    if (e["ph"] == "M" && e["name"] == "thread_name") rows[e["tid"]] = e["args"]["name"];
  }
  ASSERT_EQ(by_name.size(), 6U);
  EXPECT_EQ(by_name["step 3"]["ts"], 5);
  EXPECT_EQ(by_name["step 3"]["dur"], 90);
  EXPECT_EQ(by_name["a \"name\""]["cat"], "forward");
  EXPECT_EQ(by_name["copy"]["ts"], 25.001);
  const auto row = [&](const char* name) { return rows.at(by_name[name]["tid"]); };
  EXPECT_EQ(row("step 3"), "compute");
  EXPECT_EQ(row("a \"name\""), "compute");
  EXPECT_EQ(row("copy"), "copies");
  EXPECT_EQ(row("first"), "communication");
  EXPECT_EQ(row("second"), "communication 2");
  EXPECT_EQ(row("third"), "communication");
}

}  // namespace
}  // namespace regather
