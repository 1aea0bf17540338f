#include "launcher/compare_pictures.h"

#include <gtest/gtest.h>

#include <regex>

#include "launcher/svg.h"
#include "tests/launcher/comparison_example.h"

namespace regather::testing {
namespace {

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

// Every element is closed, in order, and no number is missing.
void expect_well_formed(const std::string& svg) {
  std::vector<std::string> open;
  const std::regex tag("<(/?)([a-z]+)[^>]*?(/?)>");
  for (std::sregex_iterator it(svg.begin(), svg.end(), tag), end; it != end; ++it) {
    if ((*it)[1].length() > 0) {
      ASSERT_FALSE(open.empty());
      EXPECT_EQ(open.back(), (*it)[2].str());
      open.pop_back();
    } else if ((*it)[3].length() == 0) {
      open.push_back((*it)[2].str());
    }
  }
  EXPECT_TRUE(open.empty());
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
}

TEST(MemoryPicture, HasAPanelAPolicyWithEveryKindAndTheUnits) {
  const std::string svg = memory_picture(example());
  expect_well_formed(svg);
  for (const char* words : {">none<", ">full<", ">segments<", ">memory of a rank, MiB<", ">time in the step, s<",
                            ">activations<", ">optimizer<", ">forward<", ">backward<", "peak 100.0 MiB"})
    EXPECT_GE(count(svg, words), 1U) << words;
  EXPECT_EQ(count(svg, "<path"), 3U * 6U);  // an area for each kind in each panel
}

// The panels have one scale: a policy with half the memory is half as high.
TEST(MemoryPicture, PanelsShareTheirScale) {
  Comparison c = example();
  c.policies = {c.policies[0], c.policies[0]};
  for (auto& point : c.policies[1].timeline.points)
    for (auto& bytes : point.live) bytes /= 2;
  const std::string svg = memory_picture(c);
  const std::regex area("<path d=\"([^\"]*)Z\" fill=\"#6fb08c\"");  // the top of the stack
  std::vector<double> heights;
  for (std::sregex_iterator it(svg.begin(), svg.end(), area), end; it != end; ++it) {
    const std::string path = (*it)[1];
    const std::regex point("[ML]([0-9.]+) ([0-9.]+)");
    double top = 1e9;
    for (std::sregex_iterator p(path.begin(), path.end(), point); p != end; ++p)
      top = std::min(top, std::stod((*p)[2]));
    heights.push_back(104 + 190 - top);  // both are in the first row of panels
  }
  ASSERT_EQ(heights.size(), 2U);
  EXPECT_NEAR(heights[0], 2 * heights[1], 0.3);
}

TEST(MemoryPicture, SaysWhatWasNotRunAndDrawsTheLimit) {
  const std::string svg = memory_picture(limited_example());
  expect_well_formed(svg);
  EXPECT_EQ(count(svg, ">not run<"), 1U);
  EXPECT_GE(count(svg, "memory.limit 150.0 MiB"), 1U);
}

TEST(TimePicture, HasAPointAndALabelAPolicy) {
  const std::string svg = time_picture(example());
  expect_well_formed(svg);
  EXPECT_EQ(count(svg, "<circle"), 3U);
  for (const char* words : {">none<", ">full<", ">segments<", "peak memory of a rank, MiB", "time of a step, s"})
    EXPECT_EQ(count(svg, words), 1U) << words;
  EXPECT_EQ(count(time_picture(limited_example()), "<circle"), 2U);
  EXPECT_GE(count(time_picture(limited_example()), "does not fit: none"), 1U);
}

TEST(TimePicture, LabelsOfNearPointsDoNotLieOnEachOther) {
  Comparison c = example();
  for (PolicyResult& p : c.policies) {
    p.measured = c.policies[0].measured;
    p.seconds = 1;
  }
  const std::string svg = time_picture(c);
  const std::regex label("<text x=\"([0-9.]+)\" y=\"([0-9.]+)\"[^>]*>(none|full|segments)<");
  std::vector<std::pair<std::string, std::string>> places;
  for (std::sregex_iterator it(svg.begin(), svg.end(), label), end; it != end; ++it)
    places.emplace_back((*it)[1], (*it)[2]);
  ASSERT_EQ(places.size(), 3U);
  EXPECT_NE(places[0], places[1]);
  EXPECT_NE(places[1], places[2]);
  EXPECT_NE(places[0], places[2]);
}

TEST(Pictures, OfNothingThatFitsAreStillPictures) {
  Comparison c = limited_example();
  for (PolicyResult& p : c.policies) {
    p.refused = "does not fit";
    p.timeline = {};
  }
  c.reference = -1;
  expect_well_formed(memory_picture(c));
  expect_well_formed(time_picture(c));
}

TEST(ThinnedTimeline, KeepsThePeakAndTheOrder) {
  MemoryTimeline timeline;
  timeline.seconds = 1;
  for (int i = 0; i < 10000; ++i) {
    BytesByTag live{};
    live[index(Tag::Activations)] = i == 6543 ? 1'000'000 : i % 97;
    timeline.points.push_back({i / 10000.0, live});
  }
  const MemoryTimeline thin = thinned(timeline, 100);
  EXPECT_EQ(thin.points.size(), 100U);
  std::int64_t most = 0;
  for (std::size_t i = 0; i < thin.points.size(); ++i) {
    most = std::max(most, thin.points[i].live[index(Tag::Activations)]);
    if (i > 0) {
      EXPECT_GT(thin.points[i].seconds, thin.points[i - 1].seconds);
    }
  }
  EXPECT_EQ(most, 1'000'000);
  EXPECT_EQ(thinned(timeline, 20000).points.size(), 10000U);
}

TEST(Svg, EscapesWords) {
  SvgCanvas canvas(10, 10, "a < b", "\"c\" & d");
  canvas.text({1, 2}, "<script>", {});
  const std::string svg = canvas.finish();
  EXPECT_EQ(svg.find("<script>"), std::string::npos);
  EXPECT_NE(svg.find("&lt;script&gt;"), std::string::npos);
  EXPECT_NE(svg.find("&quot;c&quot; &amp; d"), std::string::npos);
}

TEST(Svg, TicksAreRoundAndEncloseTheRange) {
  for (const auto& [low, high] : {std::pair{0.0, 25.9}, {0.3, 0.55}, {0.0, 1e-9}, {5.0, 5.0}, {0.0, 3e9}}) {
    const AxisTicks ticks = axis_ticks(low, high, 6);
    EXPECT_LE(ticks.low, low);
    EXPECT_GE(ticks.high, high * (1 - 1e-9));
    EXPECT_GE(ticks.values.size(), 3U);
    EXPECT_LE(ticks.values.size(), 14U);
  }
  EXPECT_EQ(tick_label(0.30000000000000004, 0.1), "0.3");
  EXPECT_EQ(tick_label(20, 10), "20");
  EXPECT_EQ(tick_label(-1e-17, 0.1), "0.0");
}

}  // namespace
}  // namespace regather::testing
