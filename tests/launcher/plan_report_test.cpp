#include "launcher/plan_report.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace regather {
namespace {

PlanReport example() {
  PlanReport r;
  r.name = "c.yaml";
  r.model = "gpt2, 3 layers";
  r.batch = "micro_batch 4";
  r.sharding = "full, 3 resident slots, prefetch 1 (planned)";
  r.checkpointing = "budget: layers 0-1 of 3";
  r.world = 2;
  r.memory_limit = 80 << 20;
  r.blocks = {keep_only({"mid", "attn.core"}), keep_only({"mid", "attn.core"}), keep_all()};
  StepForecast& f = r.forecast;
  f.peak = 64 << 20;
  f.at_peak[index(Tag::Activations)] = 32 << 20;
  f.peak_of[index(Tag::Activations)] = 40 << 20;
  f.wire_bytes = 6 << 20;
  f.collectives[{Collective::AllGather, "block", Pass::Forward, DType::F32}] = {3, 0, 2 << 20, 0, 0};
  f.collectives[{Collective::AllGather, "block", Pass::Backward, DType::F32}] = {2, 0, 4 << 20, 0, 0};
  f.seconds = {.forward = 0.010, .recompute = 0.002, .backward = 0.020};
  const auto moment = [&](Pass pass, int part, std::int64_t kept, std::vector<std::string> reruns, double seconds) {
    Action a{.pass = pass, .part = part, .micro_batch = 0};
    a.keep_activations = pass == Pass::Forward && part == 2;
    f.moments.push_back({.action = a, .kept = kept, .rerun_seconds = seconds, .reruns = std::move(reruns)});
  };
  for (int b : {0, 1, 2}) moment(Pass::Forward, b, b == 2 ? 8 << 20 : 4 << 20, {}, 0);
  moment(Pass::Backward, 2, 0, {}, 0);
  for (int b : {1, 0}) moment(Pass::Backward, b, 0, {"attn.norm", "gelu"}, 0.001);
  r.keep.frontier = {{16 << 20, 0.040, 2, 0, 1}, {32 << 20, 0.032, 0, 2, 1}, {48 << 20, 0.030, 0, 0, 3}};
  r.keep.chosen = 1;
  return r;
}

bool says(const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; }

TEST(PlanReport, SaysWhatIsKeptWhyAndWhatItCosts) {
  const std::string text = plan_words(example());
  for (const char* words :
       {"regather plan c.yaml: gpt2, 3 layers; 2 ranks, micro_batch 4", "total", "64.0", "activations", "32.0     40.0",
        "memory.limit 80.0 MiB: fits by 16.0 MiB", "all_gather of block",
        "\n  sharding: full, 3 resident slots, prefetch 1 (planned)\n  checkpointing: budget: ",
        "0-1      its input, attn.core, mid", "runs again: attn.norm, gelu", "2        all that is costly",
        "its backward comes first", "<- this plan", "6.7%"})
    EXPECT_TRUE(says(text, words)) << words << "\n" << text;
  PlanReport over = example();
  over.memory_limit = 60 << 20;
  EXPECT_TRUE(says(plan_words(over), "exceeded by 4.0 MiB"));
}

TEST(PlanReport, SaysWhatWaitsInHostMemory) {
  EXPECT_FALSE(says(plan_words(example()), "host"));
  PlanReport r = example();
  for (int b : {0, 1}) {
    r.blocks[static_cast<std::size_t>(b)].inputs = Placement::Offload;
    r.blocks[static_cast<std::size_t>(b)].marks["mid"] = Placement::Offload;
    r.forecast.moments[static_cast<std::size_t>(b)].moved = 3 << 20;
  }
  r.forecast.seconds.stalled = 0.0015;
  r.keep.frontier[1].host = 6 << 20;
  r.forecast.at_peak[index(Tag::Host)] = 5 << 20;
  r.forecast.peak_of[index(Tag::Host)] = 7 << 20;
  const std::string text = plan_words(r);
  for (const char* words :
       {"0-1      attn.core ", "         in host memory: its input, mid\n", "host, MiB", "6.0  <- this plan",
        "\n  in host memory                 5.0      7.0\n", "waiting for the host's memory   1.5"})
    EXPECT_TRUE(says(text, words)) << words << "\n" << text;
  EXPECT_EQ(nlohmann::json::parse(to_json(r))["checkpointing"]["blocks"][0]["in_host_memory"].size(), 2U);
  EXPECT_EQ(nlohmann::json::parse(to_json(r))["memory_bytes"]["host_bytes"], 7 << 20);
}

TEST(PlanReport, ListsNoPlanThatAnotherBeatsInTheFiguresAsPrinted) {
  PlanReport r = example();
  const auto frontier = [&](std::vector<KeepPlan::Point> points, std::size_t chosen) {
    r.keep.frontier = std::move(points);
    r.keep.chosen = chosen;
    const std::string text = plan_words(r);
    return text.substr(text.find("all costly"));
  };
  const std::int64_t a = 16 << 20, b = 32 << 20;
  const std::string text = frontier({{a, 0.040, 2, 0, 1}, {a + 1, 0.039, 2, 1, 0}, {b, 0.03, 0, 0, 3}}, 2);
  EXPECT_FALSE(says(text, "40.0")) << text;
  EXPECT_TRUE(says(text, "39.0")) << text;
  // What was chosen is listed, and nothing in its place that only looks as small.
  const std::string chosen = frontier({{a, 0.040, 2, 0, 1}, {a + 1, 0.039, 2, 1, 0}, {b, 0.03, 0, 0, 3}}, 0);
  EXPECT_TRUE(says(chosen, "40.0")) << chosen;
  EXPECT_FALSE(says(chosen, "39.0")) << chosen;
  EXPECT_FALSE(says(frontier({{a, 0.030, 2, 0, 1}, {b, 0.03 - 1e-9, 0, 0, 3}}, 0), "32.0"));
  EXPECT_EQ(nlohmann::json::parse(to_json(r))["frontier"]["points"].size(), 2U);
}

TEST(PlanReport, SaysWhereItsPricesComeFrom) {
  PlanReport r = example();
  EXPECT_TRUE(says(plan_words(r), "--calibrate measures them"));
  r.prices = PlanReport::Prices::Measured;
  EXPECT_TRUE(says(plan_words(r), "--calibrate measured"));
  r.bandwidth = 1e10;
  EXPECT_TRUE(says(plan_words(r), "at 10 GB/s"));
}

TEST(PlanReport, JsonHasTheNumbers) {
  const auto json = nlohmann::json::parse(to_json(example()));
  EXPECT_EQ(json["memory_bytes"]["peak"], 64 << 20);
  EXPECT_EQ(json["memory_bytes"]["fits"], true);
  EXPECT_EQ(json["memory_bytes"]["peak_of"]["activations"], 40 << 20);
  EXPECT_DOUBLE_EQ(json["step_seconds"]["total"].get<double>(), 0.032);
  EXPECT_EQ(json["collectives"]["bytes_on_wire"], 6 << 20);
  EXPECT_EQ(json["checkpointing"]["blocks"][1]["reruns"][0], "attn.norm");
  EXPECT_EQ(json["frontier"]["points"].size(), 3U);
}

TEST(PlanReport, ThePictureShowsEveryPointAndTheChosenOne) {
  const std::string svg = plan_picture(example());
  std::size_t circles = 0;
  for (std::size_t at = 0; (at = svg.find("<circle", at)) != std::string::npos; ++at) ++circles;
  EXPECT_EQ(circles, 3U);
  EXPECT_TRUE(says(svg, "this plan"));
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
}

}  // namespace
}  // namespace regather
