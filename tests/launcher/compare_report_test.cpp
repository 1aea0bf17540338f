#include "launcher/compare_report.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "tests/launcher/comparison_example.h"
#include "tests/message_of.h"

namespace regather::testing {
namespace {

// The cells of the row that begins with `name`, of the Markdown table.
std::vector<std::string> row(const Comparison& c, const std::string& name) {
  const std::string text = comparison_table(c).markdown();
  const std::size_t begin = text.find(name);
  if (begin == std::string::npos) return {};
  std::vector<std::string> cells;
  std::string line = text.substr(begin, text.find('\n', begin) - begin);
  for (std::size_t bar; (bar = line.find('|')) != std::string::npos; line.erase(0, bar + 2))
    cells.push_back(line.substr(0, bar - 1));
  return cells;
}
using Cells = std::vector<std::string>;

TEST(ComparisonTable, HasAColumnAPolicyAndSaysWhatIsMeasured) {
  const Comparison c = example();
  EXPECT_EQ(row(c, "peak"), (Cells{"peak", "200.0", "100.0", "120.0"}));
  EXPECT_EQ(row(c, "optimizer"), (Cells{"optimizer", "40.0", "40.0", "40.0"}));
  EXPECT_EQ(row(c, "activations, at most"), (Cells{"activations, at most", "122.0", "20.0", "41.0"}));
  EXPECT_EQ(row(c, "tokens/s"), (Cells{"tokens/s", "1000", "781", "800"}));
  EXPECT_EQ(row(c, "relative to none"), (Cells{"relative to none", "1.00x", "0.78x", "0.80x"}));
  EXPECT_EQ(row(c, "recomputed, of a forward"), (Cells{"recomputed, of a forward", "0%", "90%", "95%"}));
  EXPECT_EQ(row(c, "all-gather"), (Cells{"all-gather", "10", "10", "12"}));
  EXPECT_EQ(row(c, "MiB on the wire"), (Cells{"MiB on the wire", "15.0", "15.0", "17.0"}));
  EXPECT_EQ(row(c, "gradients, "), Cells{});
  EXPECT_EQ(row(c, "every bit the same"), (Cells{"every bit the same", "yes", "yes", "yes"}));
  EXPECT_EQ(row(c, "fits memory.limit"), (Cells{"fits memory.limit", "-", "-", "-"}));
}

TEST(ComparisonTable, ALimitSaysWhatFitsAndWhatWasNotRunIsPlannedInBrackets) {
  const Comparison c = limited_example();
  EXPECT_EQ(row(c, "fits memory.limit"), (Cells{"fits memory.limit (150.0 MiB)", "NO", "yes", "yes"}));
  EXPECT_EQ(row(c, "peak"), (Cells{"peak", "(200.0)", "100.0", "120.0"}));
  EXPECT_EQ(row(c, "tokens/s"), (Cells{"tokens/s", "-", "781", "800"}));
  EXPECT_EQ(row(c, "relative to full").size(), 4U);
}

TEST(ComparisonTable, WhatWaitsInHostMemoryIsARowWhereAPolicyMovesSomething) {
  Comparison c = limited_example();
  EXPECT_EQ(row(c, "in host memory"), Cells{});
  c.policies[0].planned.peak_of[index(Tag::Host)] = 7 << 20;
  c.policies[2].planned.peak_of[index(Tag::Host)] = c.policies[2].measured.peak_of[index(Tag::Host)] = 9 << 20;
  EXPECT_EQ(row(c, "in host memory"), (Cells{"in host memory, at most", "(7.0)", "0.0", "9.0"}));
  EXPECT_EQ(row(c, "peak"), (Cells{"peak", "(200.0)", "100.0", "120.0"}));
  EXPECT_EQ(nlohmann::json::parse(to_json(c))["policies"][2]["memory_bytes"]["host_bytes"], 9 << 20);
}

TEST(ComparisonTable, ColumnsOfThePlainTextAreAligned) {
  const std::string text = comparison_table(example()).text("  ");
  std::size_t end_of_peak = 0, end_of_speed = 0;
  for (std::size_t begin = 0; begin < text.size(); begin = text.find('\n', begin) + 1) {
    const std::string line = text.substr(begin, text.find('\n', begin) - begin);
    EXPECT_NE(line.back(), ' ');
    if (line.starts_with("    peak")) end_of_peak = line.size();
    if (line.starts_with("    tokens/s")) end_of_speed = line.size();
  }
  EXPECT_GT(end_of_peak, 40U);
  EXPECT_EQ(end_of_peak, end_of_speed);
}

TEST(Verdict, SaysWhatAPolicySavedAndCost) {
  const std::vector<std::string> lines = verdict(example());
  ASSERT_EQ(lines.size(), 4U);
  EXPECT_EQ(
      lines[0],
      "`none`, what the others are compared with: 1000 tokens/s, 200.0 MiB at the peak of a rank. The largest part "
      "is activations (60%): checkpointing makes it smaller.");
  EXPECT_EQ(lines[1],
            "`full`: activations 6.1x smaller, peak 2.0x smaller, 1.28x slower, communication unchanged, gradients "
            "identical. The largest part is now optimizer state (40%): shard over more ranks or train fewer parameters "
            "(model.frozen, model.lora).");
  EXPECT_TRUE(contains(lines[2], "1.13x the communication (2 more collectives a step)")) << lines[2];
  EXPECT_EQ(lines[3], "`none` is the fastest; `full` needs least memory, 100.0 MiB instead of 200.0 MiB a rank.");
}

TEST(Verdict, ADifferenceWithinTheSpreadIsNone) {
  Comparison c = example();
  c.policies[1].slowdown = 1.04;
  c.policies[1].spread = 0.05;
  EXPECT_TRUE(contains(verdict(c)[1], "as fast (within 5%)")) << verdict(c)[1];
  c.policies[1].spread = 0.01;
  EXPECT_TRUE(contains(verdict(c)[1], "1.04x slower")) << verdict(c)[1];
}

TEST(Verdict, NoPolicyIsTheFastestWithinTheSpreadOrByOneMeasurement) {
  Comparison c = example();
  c.policies[1].slowdown = 1.04;
  c.policies[1].spread = 0.05;
  EXPECT_EQ(
      verdict(c).back(),
      "`none`, `full` are as fast as each other, within the spread; `full` needs least memory, 100.0 MiB a rank.");
  c = example();
  c.steps = c.rounds = 1;
  EXPECT_TRUE(contains(verdict(c)[1], "as fast as can be told (one measurement)")) << verdict(c)[1];
  EXPECT_EQ(verdict(c).back(),
            "`full` needs least memory, 100.0 MiB a rank; one measurement each does not rank their speeds.");
  for (const std::string& line : verdict(c))
    for (const std::string word : {"faster", "slower", "fastest"}) EXPECT_FALSE(contains(line, word)) << line;
}

TEST(Verdict, WhatShouldBeEqualAndIsNotIsSaidAloud) {
  Comparison c = example();
  EXPECT_TRUE(holds(c));
  c.policies[1].identical = false;
  c.policies[1].gradient_difference = 1.5e-7;
  EXPECT_FALSE(holds(c));
  EXPECT_TRUE(contains(verdict(c)[1], "NOT the same numbers (loss differs by 0, gradients by 1.50e-07)"))
      << verdict(c)[1];
  EXPECT_EQ(row(c, "every bit the same"), (Cells{"every bit the same", "yes", "NO", "yes"}));
  c = example();
  c.policies[2].communication_differs = {"all_gather of block: planned 10, counted 12"};
  EXPECT_FALSE(holds(c));
  EXPECT_TRUE(contains(verdict(c)[2], "NOT as planned")) << verdict(c)[2];
  EXPECT_TRUE(contains(comparison_markdown(c, "m.svg", "t.svg"), "planned 10, counted 12"));
}

TEST(Verdict, WhatDoesNotFitIsARow) {
  const std::vector<std::string> lines = verdict(limited_example());
  EXPECT_TRUE(contains(lines[0], "`full`, what the others are compared with")) << lines[0];
  EXPECT_EQ(lines[1], "`none`: does not fit: it needs 200.0 MiB.");
  EXPECT_TRUE(lines.back().starts_with("Of those that fit: `full` is the fastest and needs least memory"));
}

TEST(Verdict, WithoutAnyThatFitsItSaysWhatNeedsLeastAndWhatWouldHelp) {
  Comparison c = limited_example();
  for (PolicyResult& p : c.policies) p.refused = "does not fit";
  c.reference = -1;
  EXPECT_EQ(verdict(c).back(),
            "No policy fits. `full` needs least, 100.0 MiB, most of it optimizer state: shard over more ranks or train "
            "fewer parameters (model.frozen, model.lora).");
  c.sharded = false;
  EXPECT_TRUE(contains(verdict(c).back(), "sharding.strategy: full"));
  EXPECT_FALSE(comparison_table(c).text("").empty());
}

TEST(ComparisonMarkdown, EmbedsThePicturesAndTheTable) {
  const std::string text = comparison_markdown(example(), "memory.svg", "time.svg");
  EXPECT_TRUE(contains(text, "](memory.svg)"));
  EXPECT_TRUE(contains(text, "](time.svg)"));
  EXPECT_TRUE(contains(text, "|  | none | full | segments |\n|---|---:|---:|---:|"));
  EXPECT_TRUE(contains(text, "- " + verdict(example())[1]));
}

TEST(ComparisonJson, HasEveryFigureInBytesAndSeconds) {
  Comparison c = limited_example();
  c.policies[1].gradient_difference = std::numeric_limits<double>::infinity();
  const auto json = nlohmann::json::parse(to_json(c));
  EXPECT_EQ(json["reference"], "full");
  EXPECT_EQ(json["policies"][0]["ran"], false);
  EXPECT_EQ(json["policies"][0]["fits_limit"], false);
  EXPECT_EQ(json["policies"][0]["planned_bytes"]["peak"], 200 << 20);
  const auto& full = json["policies"][1];
  EXPECT_EQ(full["memory_bytes"]["at_peak"]["optimizer"], 40 << 20);
  EXPECT_EQ(full["collectives"]["per_step"][0]["name"], "all_gather");
  EXPECT_EQ(full["collectives"]["per_step"][0]["count"], 10);
  EXPECT_EQ(full["gradient_difference"], "infinite");
  EXPECT_EQ(full["timeline"]["seconds"].size(), full["timeline"]["bytes"]["activations"].size());
  EXPECT_EQ(json["verdict"].size(), 4U);
}

}  // namespace
}  // namespace regather::testing
