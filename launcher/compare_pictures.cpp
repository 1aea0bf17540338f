#include "launcher/compare_pictures.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "launcher/progress.h"
#include "launcher/svg.h"

namespace regather {
namespace {

struct Kind {
  Tag tag;
  std::string_view colour;
};
// From the bottom of the stack: what a step starts with, then what checkpointing changes, then what comes and goes.
constexpr std::array kStack = {Kind{Tag::Parameters, "#4c6a92"}, Kind{Tag::Gradients, "#7f9dc4"},
                               Kind{Tag::Optimizer, "#b9cbe2"},  Kind{Tag::Activations, "#e07b39"},
                               Kind{Tag::Workspace, "#ecc65a"},  Kind{Tag::Gathered, "#6fb08c"}};

double total(const BytesByTag& live) {
  double sum = 0;
  for (const Kind& kind : kStack) sum += static_cast<double>(live[index(kind.tag)]);
  return sum;
}

std::string subtitle(const Comparison& c) {
  return fmt::format("{}; {} rank{}, {}", c.model, c.world, c.world == 1 ? "" : "s", c.batch);
}

// ---- memory over a step ---------------------------------------------------------------------------------------------

constexpr double kPanelWidth = 420, kPanelHeight = 190, kLeft = 64, kGap = 34, kTop = 104, kBelow = 74;

struct MemoryScales {
  AxisTicks bytes, seconds;
  SvgByteUnit unit;
};

MemoryScales memory_scales(const Comparison& c) {
  double most = 1, longest = 1e-9;
  for (const PolicyResult& p : c.policies) {
    for (const auto& point : p.timeline.points) most = std::max(most, total(point.live));
    longest = std::max(longest, p.timeline.seconds);
  }
  const auto limit = static_cast<double>(c.memory_limit);
  if (limit > most && limit < 1.6 * most) most = limit;
  const SvgByteUnit unit = svg_byte_unit(most);
  return {axis_ticks(0, 1.08 * most / unit.bytes, 5), axis_ticks(0, longest, 6), unit};
}

void legend(SvgCanvas& canvas, double x, double y) {
  for (auto kind = kStack.rbegin(); kind != kStack.rend(); ++kind) {
    canvas.rectangle(x, y - 10, 12, 12, kind->colour);
    canvas.text({x + 17, y}, name_of(kind->tag), {.size = 12, .colour = kSvgInk});
    x += 17 + svg_width(name_of(kind->tag), 12) + 20;
  }
}

// One outline a kind; a step changes at a moment, so lines are horizontal or vertical.
void draw_stack(SvgCanvas& canvas, const MemoryTimeline& timeline, const SvgScale& x, const SvgScale& y, double unit) {
  std::vector<double> below(timeline.points.size(), 0.0);
  for (const Kind& kind : kStack) {
    std::vector<SvgPoint> top, bottom;
    for (std::size_t i = 0; i < timeline.points.size(); ++i) {
      const double from = x(timeline.points[i].seconds);
      const double to = x(i + 1 < timeline.points.size() ? timeline.points[i + 1].seconds : timeline.seconds);
      const double base = below[i];
      below[i] += static_cast<double>(timeline.points[i].live[index(kind.tag)]) / unit;
      for (const double at : {from, to}) {
        top.push_back({at, y(below[i])});
        bottom.push_back({at, y(base)});
      }
    }
    top.insert(top.end(), bottom.rbegin(), bottom.rend());
    canvas.polygon(top, kind.colour);
  }
}

void draw_phases(SvgCanvas& canvas, const MemoryTimeline& timeline, const SvgScale& x, const SvgScale& y) {
  if (timeline.backward_begin == 0) return;
  const std::array<std::pair<std::string_view, double>, 4> phases = {{{"forward", 0.0},
                                                                      {"backward", timeline.backward_begin},
                                                                      {"update", timeline.update_begin},
                                                                      {"", timeline.seconds}}};
  for (std::size_t i = 0; i + 1 < phases.size(); ++i) {
    const double from = x(phases[i].second), to = x(phases[i + 1].second);
    if (i > 0) canvas.line({from, y.at_low}, {from, y.at_high}, {.colour = kSvgFaint, .width = 0.8, .dashes = "2 3"});
    if (to - from > svg_width(phases[i].first, 10))
      canvas.text({(from + to) / 2, y.at_high + 12}, phases[i].first,
                  {.size = 10, .colour = kSvgFaint, .anchor = SvgAnchor::Middle});
  }
}

void draw_panel(SvgCanvas& canvas, const Comparison& c, const PolicyResult& p, const MemoryScales& s, double left,
                double top) {
  const SvgScale x{s.seconds.low, s.seconds.high, left, left + kPanelWidth};
  const SvgScale y{s.bytes.low, s.bytes.high, top + kPanelHeight, top};
  canvas.text({left, top - 10}, p.policy, {.size = 14, .colour = kSvgInk, .bold = true});
  canvas.rectangle(left, top, kPanelWidth, kPanelHeight, kSvgPanel);
  for (const double tick : s.bytes.values)
    canvas.line({left, y(tick)}, {left + kPanelWidth, y(tick)}, {.colour = kSvgGrid});
  if (p.ran()) {
    canvas.text({left + kPanelWidth, top - 10},
                fmt::format("peak {}, step {:.2f} s", human_bytes(p.measured.total), p.timeline.seconds),
                {.size = 12, .colour = kSvgFaint, .anchor = SvgAnchor::End});
    draw_stack(canvas, thinned(p.timeline, 800), x, y, s.unit.bytes);
    draw_phases(canvas, p.timeline, x, y);
  } else {
    canvas.text({left + kPanelWidth / 2, top + kPanelHeight / 2 - 8}, "not run",
                {.size = 14, .colour = kSvgLimit, .anchor = SvgAnchor::Middle, .bold = true});
    canvas.text({left + kPanelWidth / 2, top + kPanelHeight / 2 + 12}, p.refused,
                {.size = 11, .colour = kSvgFaint, .anchor = SvgAnchor::Middle});
  }
  const double limit = static_cast<double>(c.memory_limit) / s.unit.bytes;
  if (c.memory_limit > 0 && limit <= s.bytes.high) {
    canvas.line({left, y(limit)}, {left + kPanelWidth, y(limit)}, {.colour = kSvgLimit, .width = 1.2, .dashes = "6 3"});
    canvas.text({left + kPanelWidth - 4, y(limit) - 4}, "memory.limit " + human_bytes(c.memory_limit),
                {.size = 10, .colour = kSvgLimit, .anchor = SvgAnchor::End});
  }
  canvas.line({left, y.at_low}, {left + kPanelWidth, y.at_low}, {.colour = kSvgFaint});
}

void draw_axes(SvgCanvas& canvas, const MemoryScales& s, double left, double top, bool bytes, bool seconds) {
  const SvgScale x{s.seconds.low, s.seconds.high, left, left + kPanelWidth};
  const SvgScale y{s.bytes.low, s.bytes.high, top + kPanelHeight, top};
  const SvgFont label{.size = 11, .colour = kSvgFaint};
  if (bytes) {
    for (const double tick : s.bytes.values) {
      SvgFont font = label;
      font.anchor = SvgAnchor::End;
      canvas.text({left - 7, y(tick) + 4}, tick_label(tick, s.bytes.step), font);
    }
    canvas.text({left - 46, top + kPanelHeight / 2}, fmt::format("memory of a rank, {}", s.unit.name),
                {.size = 12, .colour = kSvgInk, .anchor = SvgAnchor::Middle, .rotate = -90});
  }
  for (const double tick : s.seconds.values) {
    canvas.line({x(tick), y.at_low}, {x(tick), y.at_low + 4}, {.colour = kSvgFaint});
    SvgFont font = label;
    font.anchor = SvgAnchor::Middle;
    canvas.text({x(tick), y.at_low + 17}, tick_label(tick, s.seconds.step), font);
  }
  if (seconds)
    canvas.text({left + kPanelWidth / 2, y.at_low + 35}, "time in the step, s",
                {.size = 12, .colour = kSvgInk, .anchor = SvgAnchor::Middle});
}

}  // namespace

MemoryTimeline thinned(const MemoryTimeline& timeline, std::size_t points) {
  if (timeline.points.size() <= points || points == 0) return timeline;
  MemoryTimeline out = timeline;
  out.points.clear();
  std::size_t bin = points;  // of the last point of `out`
  for (const auto& point : timeline.points) {
    const double share = timeline.seconds > 0 ? point.seconds / timeline.seconds : 0;
    const auto of = std::min(points - 1, static_cast<std::size_t>(std::max(share, 0.0) * static_cast<double>(points)));
    if (of != bin || out.points.empty())
      out.points.push_back(point);
    else if (total(point.live) > total(out.points.back().live))
      out.points.back() = point;
    bin = of;
  }
  return out;
}

std::string memory_picture(const Comparison& c) {
  const std::size_t columns = std::min<std::size_t>(2, std::max<std::size_t>(1, c.policies.size()));
  const std::size_t rows = (c.policies.size() + columns - 1) / columns;
  const double width = kLeft + static_cast<double>(columns) * (kPanelWidth + kGap) - kGap + 24;
  const double height = kTop + static_cast<double>(rows) * (kPanelHeight + kBelow) - 20;
  const std::string title = "Memory of a rank over one step";
  SvgCanvas canvas(width, height, title,
                   "One panel for each checkpoint policy; bytes that are live, stacked by kind, over time.");
  canvas.text({16, 28}, title, {.size = 18, .colour = kSvgInk, .bold = true});
  canvas.text({16, 47}, subtitle(c), {.size = 12, .colour = kSvgFaint});
  legend(canvas, 16, 70);
  const MemoryScales scales = memory_scales(c);
  for (std::size_t i = 0; i < c.policies.size(); ++i) {
    const double left = kLeft + static_cast<double>(i % columns) * (kPanelWidth + kGap);
    const double top = kTop + static_cast<double>(i / columns) * (kPanelHeight + kBelow);
    draw_panel(canvas, c, c.policies[i], scales, left, top);
    draw_axes(canvas, scales, left, top, i % columns == 0, true);
  }
  return canvas.finish();
}

// ---- time against peak ----------------------------------------------------------------------------------------------

namespace {

struct Box {
  double x, y, width, height;
  bool meets(const Box& b) const {
    return x < b.x + b.width && b.x < x + width && y < b.y + b.height && b.y < y + height;
  }
};

// Beside its point where nothing else is: right, left, above, below; to the right if there is no such place.
struct Labels {
  Box area;
  std::vector<Box> taken;
  SvgPoint place(SvgPoint point, const std::string& words, double size) {
    const double w = svg_width(words, size), h = size;
    const std::array<SvgPoint, 6> places = {{{point.x + 11, point.y + 4},
                                             {point.x - 11 - w, point.y + 4},
                                             {point.x - w / 2, point.y - 12},
                                             {point.x - w / 2, point.y + 20},
                                             {point.x + 9, point.y - 10},
                                             {point.x + 9, point.y + 18}}};
    for (const SvgPoint& at : places) {
      const Box box{at.x, at.y - h, w, h + 3};
      const bool inside = box.x >= area.x && box.x + w <= area.x + area.width && box.y >= area.y &&
                          box.y + box.height <= area.y + area.height;
      if (!inside || std::ranges::any_of(taken, [&](const Box& b) { return b.meets(box); })) continue;
      taken.push_back(box);
      return at;
    }
    return places[0];
  }
};

struct Range {
  double low, high;
};
// With room around the points; from zero if that is not far below them.
Range padded(double low, double high) {
  const double room = std::max(0.35 * (high - low), 0.08 * high);
  return {low < 2 * (high - low) ? 0 : std::max(0.0, low - room), high + room};
}

}  // namespace

std::string time_picture(const Comparison& c) {
  constexpr double kWidth = 760, kHeight = 470, kX0 = 78, kX1 = 736, kY0 = 396, kY1 = 76;
  const std::string title = "Time of a step against peak memory";
  SvgCanvas canvas(kWidth, kHeight, title,
                   "One point for each checkpoint policy: to the left is less memory, below is faster.");
  canvas.text({16, 28}, title, {.size = 18, .colour = kSvgInk, .bold = true});
  canvas.text({16, 47}, subtitle(c), {.size = 12, .colour = kSvgFaint});
  std::vector<const PolicyResult*> ran;
  std::string refused;
  for (const PolicyResult& p : c.policies) {
    if (p.ran())
      ran.push_back(&p);
    else
      refused += fmt::format("{}{}", refused.empty() ? "not run, does not fit: " : ", ", p.policy);
  }
  canvas.rectangle(kX0, kY1, kX1 - kX0, kY0 - kY1, kSvgPanel);
  if (ran.empty()) {
    canvas.text({(kX0 + kX1) / 2, (kY0 + kY1) / 2}, "no policy fits",
                {.size = 14, .colour = kSvgLimit, .anchor = SvgAnchor::Middle, .bold = true});
    return canvas.finish();
  }
  double least = 1e300, most = 0, fastest = 1e300, slowest = 0;
  for (const PolicyResult* p : ran) {
    least = std::min(least, static_cast<double>(p->measured.total));
    most = std::max(most, static_cast<double>(p->measured.total));
    fastest = std::min(fastest, *std::ranges::min_element(p->step_seconds));
    slowest = std::max(slowest, *std::ranges::max_element(p->step_seconds));
  }
  const auto limit = static_cast<double>(c.memory_limit);
  if (limit > most && limit < 1.3 * most) most = limit;
  const SvgByteUnit unit = svg_byte_unit(most);
  const Range memory = padded(least / unit.bytes, most / unit.bytes), time = padded(fastest, slowest);
  const AxisTicks bytes = axis_ticks(memory.low, memory.high, 7), seconds = axis_ticks(time.low, time.high, 8);
  const SvgScale x{bytes.low, bytes.high, kX0, kX1}, y{seconds.low, seconds.high, kY0, kY1};
  const SvgAxis across{x, bytes, fmt::format("peak memory of a rank, {} (less to the left)", unit.name)},
      up{y, seconds, "time of a step, s (faster below)"};
  svg_grid(canvas, across, up);
  canvas.line({kX0, kY0}, {kX1, kY0}, {.colour = kSvgFaint});
  canvas.line({kX0, kY0}, {kX0, kY1}, {.colour = kSvgFaint});
  svg_axis_titles(canvas, across, up);
  if (limit > 0 && limit / unit.bytes >= bytes.low && limit / unit.bytes <= bytes.high) {
    const double at = x(limit / unit.bytes);
    canvas.line({at, kY0}, {at, kY1}, {.colour = kSvgLimit, .width = 1.2, .dashes = "6 3"});
    canvas.text({at - 5, kY1 + 14}, "memory.limit", {.size = 10, .colour = kSvgLimit, .anchor = SvgAnchor::End});
  }
  Labels labels{{kX0, kY1, kX1 - kX0, kY0 - kY1}, {}};
  for (const PolicyResult* p : ran) {
    const SvgPoint at{x(static_cast<double>(p->measured.total) / unit.bytes), y(p->seconds)};
    labels.taken.push_back({at.x - 7, at.y - 7, 14, 14});
  }
  for (const PolicyResult* p : ran) {
    const SvgPoint at{x(static_cast<double>(p->measured.total) / unit.bytes), y(p->seconds)};
    const auto [low, high] = std::ranges::minmax(p->step_seconds);
    canvas.line({at.x, y(low)}, {at.x, y(high)}, {.colour = "#9aa3ad", .width = 2});
    canvas.circle(at, 6.5, p == &c.policies[static_cast<std::size_t>(c.reference)] ? kSvgOther : kSvgPoint);
  }
  for (const PolicyResult* p : ran) {
    const SvgPoint at{x(static_cast<double>(p->measured.total) / unit.bytes), y(p->seconds)};
    canvas.text(labels.place(at, p->policy, 13), p->policy, {.size = 13, .colour = kSvgInk});
  }
  canvas.text({16, kHeight - 12},
              "Points are medians, bars the range over the rounds." + (refused.empty() ? "" : "  " + refused),
              {.size = 11, .colour = kSvgFaint});
  return canvas.finish();
}

}  // namespace regather
