#include "launcher/plan_report.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "launcher/progress.h"
#include "launcher/report_parts.h"
#include "launcher/svg.h"
#include "launcher/text_table.h"

namespace regather {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kAllCostly = "all that is costly";  // as policy none keeps

std::string milliseconds(double seconds) { return fmt::format("{:.1f}", 1e3 * seconds); }

// What becomes of one block in a step.
struct BlockRow {
  std::string kept;
  std::int64_t bytes = 0;                  // that it adds, of one micro-batch
  double seconds = 0;                      // that it runs again, of a step
  std::vector<std::string> reruns, moved;  // moved: what waits in host memory
  std::string why;
  bool operator==(const BlockRow& other) const {
    return kept == other.kept && moved == other.moved && bytes == other.bytes && reruns == other.reruns &&
           why == other.why;
  }
};

// What stays on the device, and what of the rest waits in host memory.
std::string kept_words(const SavePlan& plan) {
  std::vector<std::string> here = plan.placed(Placement::Keep);
  if (plan.inputs == Placement::Keep) here.insert(here.begin(), "its input");
  const bool moves = plan.inputs == Placement::Offload || !plan.placed(Placement::Offload).empty();
  if (plan.unmarked == Placement::Keep && plan.placed(Placement::Drop).empty())
    return moves ? "the rest of what is costly" : std::string(kAllCostly);
  return here.empty() ? "nothing" : fmt::format("{}", fmt::join(here, ", "));
}
std::vector<std::string> moved_names(const SavePlan& plan) {
  if (plan.unmarked == Placement::Offload) return {"everything"};
  std::vector<std::string> moved = plan.placed(Placement::Offload);
  if (plan.inputs == Placement::Offload) moved.insert(moved.begin(), "its input");
  return moved;
}

std::vector<BlockRow> block_rows(const PlanReport& r) {
  std::vector<BlockRow> rows(r.blocks.size());
  for (std::size_t b = 0; b < rows.size(); ++b) {
    rows[b].kept = kept_words(r.blocks[b]);
    rows[b].moved = moved_names(r.blocks[b]);
  }
  for (const StepForecast::Moment& m : r.forecast.moments) {
    if (m.action.part < 0) continue;
    BlockRow& row = rows[static_cast<std::size_t>(m.action.part)];
    row.seconds += m.rerun_seconds;
    if (m.action.micro_batch != 0) continue;
    row.reruns.insert(row.reruns.end(), m.reruns.begin(), m.reruns.end());
    if (m.action.pass != Pass::Forward) continue;
    row.bytes = m.kept - m.moved;
    if (m.action.keep_activations) {
      row.kept = kAllCostly;
      row.moved.clear();
      row.why = "its backward comes first";
    } else if (!m.action.keep_input) {
      row.kept = "nothing";
      row.why = "its input comes from a replay of its segment";
    }
  }
  for (BlockRow& row : rows) {
    const std::string again =
        row.reruns.empty() ? "nothing is run again" : fmt::format("runs again: {}", fmt::join(row.reruns, ", "));
    row.why = row.why.empty() ? again : fmt::format("{}; {}", row.why, again);
  }
  return rows;
}

TextTable block_table(const PlanReport& r) {
  TextTable table({"blocks", "keep MiB", "rerun ms"});
  const std::vector<BlockRow> rows = block_rows(r);
  for (std::size_t first = 0; first < rows.size();) {
    std::size_t end = first + 1;
    while (end < rows.size() && rows[end] == rows[first]) ++end;
    const BlockRow& row = rows[first];
    const std::string which = end == first + 1 ? fmt::format("{}", first) : fmt::format("{}-{}", first, end - 1);
    table.row({fmt::format("{:<8} {}", which, row.kept), mebibytes(row.bytes), milliseconds(row.seconds)});
    if (!row.moved.empty()) table.heading(fmt::format("         in host memory: {}", fmt::join(row.moved, ", ")));
    table.heading(fmt::format("         {}", row.why));
    first = end;
  }
  return table;
}

TextTable memory_table(const StepForecast& f) {
  TextTable table({"memory of a rank, MiB", "at the peak", "at most"});
  table.row({"total", mebibytes(f.peak), ""});
  for (const Tag tag : kKinds)
    table.row({fmt::format("  {}", name_of(tag)), mebibytes(f.at_peak[index(tag)]), mebibytes(f.peak_of[index(tag)])});
  if (const std::int64_t host = f.peak_of[index(Tag::Host)]; host > 0)  // no part of the total
    table.row({"in host memory", mebibytes(f.at_peak[index(Tag::Host)]), mebibytes(host)});
  return table;
}

TextTable time_table(const PlanReport& r) {
  const StepForecast::Seconds& s = r.forecast.seconds;
  TextTable table({"time of a step, ms", ""});
  table.row({"total", milliseconds(s.total())});
  const std::pair<const char*, double> parts[] = {{"forward", s.forward},
                                                  {"recompute", s.recompute},
                                                  {"backward", s.backward},
                                                  {"optimizer", s.update},
                                                  {"copies and sums", s.copy},
                                                  {"communication, not hidden", s.communication},
                                                  {"between operations", s.overhead}};
  for (const auto& [name, seconds] : parts) table.row({fmt::format("  {}", name), milliseconds(seconds)});
  if (std::ranges::any_of(r.forecast.moments, [](const auto& m) { return m.moved > 0; }))
    table.row({"  waiting for the host's memory", milliseconds(s.stalled)});
  return table;
}

TextTable traffic_table(const StepForecast& f) {
  TextTable table({"collectives of a rank and step", "count", "MiB on the wire"});
  std::map<std::pair<Collective, std::string>, LedgerCounts> sums;
  LedgerCounts all;
  for (const auto& [key, counts] : f.collectives) {
    for (LedgerCounts* to : {&sums[{key.collective, key.unit}], &all}) {
      to->count += counts.count;
      to->wire_bytes += counts.wire_bytes;
    }
  }
  for (const auto& [key, counts] : sums)
    table.row({fmt::format("  {} of {}", name_of(key.first), key.second), fmt::format("{}", counts.count),
               mebibytes(counts.wire_bytes)});
  table.row({"all", fmt::format("{}", all.count), mebibytes(all.wire_bytes)});
  return table;
}

const char* counted_words(Counted counted) {
  return counted == Counted::ActivationBytes ? "activations" : "everything";
}

// The points that a person can tell to be worth their bytes: none that another one beats in the figures as printed; of
// several with the bytes of the plan that was chosen, that plan.
std::vector<std::size_t> listed_points(const KeepPlan& plan) {
  const auto& points = plan.frontier;
  std::vector<std::size_t> listed;
  for (std::size_t i = 0; i < points.size(); ++i) {  // each has more bytes than the one before, and is faster
    const bool same = !listed.empty() && mebibytes(points[listed.back()].bytes) == mebibytes(points[i].bytes);
    if (same && listed.back() == plan.chosen) continue;
    if (same) listed.pop_back();
    const bool faster =
        listed.empty() || milliseconds(points[listed.back()].seconds) != milliseconds(points[i].seconds);
    if (faster || i == plan.chosen) listed.push_back(i);
  }
  return listed;
}

TextTable frontier_table(const KeepPlan& plan) {
  const bool moves = std::ranges::any_of(plan.frontier, [](const KeepPlan::Point& p) { return p.host > 0; });
  std::vector<std::string> head{fmt::format("{}, MiB", counted_words(plan.counted)),
                                "step, ms",
                                "slower",
                                "blocks that keep: input",
                                "some",
                                "all costly",
                                ""};
  if (moves) head.insert(head.end() - 1, "host, MiB");
  TextTable table(std::move(head));
  const double fastest = plan.frontier.empty() ? 0 : plan.frontier.back().seconds;
  for (const std::size_t i : listed_points(plan)) {
    const KeepPlan::Point& p = plan.frontier[i];
    std::vector<std::string> cells{mebibytes(p.bytes),
                                   milliseconds(p.seconds),
                                   fmt::format("{:.1f}%", fastest > 0 ? 100 * (p.seconds / fastest - 1) : 0.0),
                                   fmt::format("{}", p.inputs_only),
                                   fmt::format("{}", p.partly),
                                   fmt::format("{}", p.everything),
                                   i == plan.chosen ? "<- this plan" : ""};
    if (moves) cells.insert(cells.end() - 1, mebibytes(p.host));
    table.row(std::move(cells));
  }
  return table;
}

std::string prices_words(const PlanReport& r) {
  std::string words =
      fmt::format(fmt::runtime(r.prices == PlanReport::Prices::Measured
                                   ? "operations cost what --calibrate measured on {} with as many ranks "
                                     "and threads"
                                   : "operations are priced from the limits of {}, within a factor of "
                                     "two; --calibrate measures them"),
                  r.machine);
  if (r.bandwidth > 0) words += fmt::format("; transfers run beside them at {:.3g} GB/s", 1e-9 * r.bandwidth);
  return words;
}

}  // namespace

std::string plan_words(const PlanReport& r) {
  std::string text = fmt::format("regather plan {}: {}; {} rank{}, {}\n\n", r.name, r.model, r.world,
                                 r.world == 1 ? "" : "s", r.batch);
  text += memory_table(r.forecast).text("  ");
  if (r.memory_limit > 0) {
    const std::int64_t room = r.memory_limit - r.forecast.peak;
    text += fmt::format("  memory.limit {}: {} by {}\n", human_bytes(r.memory_limit), room >= 0 ? "fits" : "exceeded",
                        human_bytes(std::abs(room)));
  }
  text += fmt::format("\n{}  {}\n\n{}\n  sharding: {}\n  checkpointing: {}\n{}\n", time_table(r).text("  "),
                      prices_words(r), traffic_table(r.forecast).text("  "), r.sharding, r.checkpointing,
                      block_table(r).text("  "));
  text += fmt::format("  what can be planned (activation_checkpointing.policy: budget)\n{}",
                      frontier_table(r.keep).text("  "));
  return text;
}

std::string to_json(const PlanReport& r) {
  Json blocks = Json::array(), frontier = Json::array();
  const std::vector<BlockRow> rows = block_rows(r);
  for (std::size_t b = 0; b < rows.size(); ++b)
    blocks.push_back({{"layer", b},
                      {"keeps", rows[b].kept},
                      {"in_host_memory", rows[b].moved},
                      {"bytes", rows[b].bytes},
                      {"rerun_seconds", rows[b].seconds},
                      {"reruns", rows[b].reruns},
                      {"why", rows[b].why}});
  for (const KeepPlan::Point& p : r.keep.frontier)
    frontier.push_back({{"bytes", p.bytes},
                        {"step_seconds", p.seconds},
                        {"host_bytes", p.host},
                        {"blocks", {{"input", p.inputs_only}, {"some", p.partly}, {"everything", p.everything}}}});
  const StepForecast::Seconds& s = r.forecast.seconds;
  const Json json = {
      {"configuration", r.name},
      {"world", r.world},
      {"memory_bytes",
       {{"peak", r.forecast.peak},
        {"at_peak", Json::parse(kinds_json(r.forecast.at_peak))},
        {"peak_of", Json::parse(kinds_json(r.forecast.peak_of))},
        {"host_bytes", r.forecast.peak_of[index(Tag::Host)]},
        {"limit", r.memory_limit},
        {"fits", r.memory_limit == 0 || r.forecast.peak <= r.memory_limit}}},
      {"step_seconds",
       {{"total", s.total()},
        {"forward", s.forward},
        {"recompute", s.recompute},
        {"backward", s.backward},
        {"optimizer", s.update},
        {"copies", s.copy},
        {"communication", s.communication},
        {"overhead", s.overhead},
        {"stalled", s.stalled},
        {"calibrated", r.prices == PlanReport::Prices::Measured}}},
      {"collectives",
       {{"per_step", Json::parse(collectives_json(r.forecast.collectives))}, {"bytes_on_wire", r.forecast.wire_bytes}}},
      {"checkpointing",
       {{"recomputed_flops", r.forecast.recomputed_flops},
        {"forward_flops", r.forecast.forward_flops},
        {"blocks", blocks}}},
      {"frontier", {{"counted", counted_words(r.keep.counted)}, {"points", frontier}}}};
  return json.dump(2) + "\n";
}

std::string plan_picture(const PlanReport& r) {
  constexpr double kWidth = 760, kHeight = 440, kX0 = 78, kX1 = 736, kY0 = 372, kY1 = 76;
  const std::string title = "What can be planned: time of a step against memory";
  SvgCanvas canvas(kWidth, kHeight, title, "To the left is less memory, below is faster.");
  canvas.text({16, 28}, title, {.size = 18, .colour = kSvgInk, .bold = true});
  canvas.text({16, 47}, fmt::format("{}; {} ranks, {}", r.model, r.world, r.batch), {.size = 12, .colour = kSvgFaint});
  canvas.rectangle(kX0, kY1, kX1 - kX0, kY0 - kY1, kSvgPanel);
  if (r.keep.frontier.empty()) return canvas.finish();
  const auto& points = r.keep.frontier;
  const SvgByteUnit unit = svg_byte_unit(static_cast<double>(points.back().bytes));
  const auto bytes = [&](const KeepPlan::Point& p) { return static_cast<double>(p.bytes) / unit.bytes; };
  const AxisTicks memory = axis_ticks(0, 1.05 * bytes(points.back()), 7),
                  seconds = axis_ticks(0.97 * points.back().seconds, 1.03 * points.front().seconds, 7);
  const SvgScale x{memory.low, memory.high, kX0, kX1}, y{seconds.low, seconds.high, kY0, kY1};
  const SvgAxis across{x, memory, fmt::format("{} at their peak, {}", counted_words(r.keep.counted), unit.name)},
      up{y, seconds, "time of a step, s (predicted)"};
  svg_grid(canvas, across, up);
  svg_axis_titles(canvas, across, up);
  for (std::size_t i = 1; i < points.size(); ++i)
    canvas.line({x(bytes(points[i - 1])), y(points[i - 1].seconds)}, {x(bytes(points[i])), y(points[i].seconds)},
                {.colour = kSvgOther, .width = 1.6});
  for (std::size_t i = 0; i < points.size(); ++i) {
    const SvgPoint at{x(bytes(points[i])), y(points[i].seconds)};
    canvas.circle(at, i == r.keep.chosen ? 7 : 4, i == r.keep.chosen ? kSvgPoint : kSvgOther);
    if (i == r.keep.chosen) canvas.text({at.x + 11, at.y - 8}, "this plan", {.size = 13, .colour = kSvgInk});
  }
  const SvgPoint end{x(bytes(points.back())), y(points.back().seconds)};
  canvas.text({end.x - 8, end.y - 12}, "as policy none", {.size = 11, .colour = kSvgFaint, .anchor = SvgAnchor::End});
  canvas.text({16, kHeight - 12}, prices_words(r), {.size = 11, .colour = kSvgFaint});
  return canvas.finish();
}

}  // namespace regather
