#include "launcher/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>

namespace regather {
namespace {

std::string escaped(std::string_view words) {
  std::string out;
  for (const char c : words) {
    if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '&')
      out += "&amp;";
    else if (c == '"')
      out += "&quot;";
    else
      out += c;
  }
  return out;
}

std::string_view name_of(SvgAnchor anchor) {
  return anchor == SvgAnchor::Start ? "start" : anchor == SvgAnchor::Middle ? "middle" : "end";
}

}  // namespace

SvgCanvas::SvgCanvas(double width, double height, std::string_view title, std::string_view description) {
  text_ = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "role=\"img\" font-family=\"Helvetica, Arial, sans-serif\">\n<title>{2}</title>\n<desc>{3}</desc>\n",
      width, height, escaped(title), escaped(description));
  rectangle(0, 0, width, height, "#ffffff");
}

void SvgCanvas::rectangle(double x, double y, double width, double height, std::string_view fill) {
  fmt::format_to(std::back_inserter(text_),
                 "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\"/>\n", x, y, width,
                 height, fill);
}

void SvgCanvas::line(SvgPoint from, SvgPoint to, const SvgLine& style) {
  fmt::format_to(
      std::back_inserter(text_),
      "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" stroke-width=\"{:g}\"{}/>\n", from.x,
      from.y, to.x, to.y, style.colour, style.width,
      style.dashes.empty() ? "" : fmt::format(" stroke-dasharray=\"{}\"", style.dashes));
}

void SvgCanvas::polygon(const std::vector<SvgPoint>& points, std::string_view fill) {
  text_ += "<path d=\"";
  for (std::size_t i = 0; i < points.size(); ++i)
    fmt::format_to(std::back_inserter(text_), "{}{:.1f} {:.1f}", i == 0 ? "M" : "L", points[i].x, points[i].y);
  fmt::format_to(std::back_inserter(text_), "Z\" fill=\"{}\"/>\n", fill);
}

void SvgCanvas::circle(SvgPoint at, double radius, std::string_view fill) {
  fmt::format_to(
      std::back_inserter(text_),
      "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:g}\" fill=\"{}\" stroke=\"#ffffff\" stroke-width=\"1.5\"/>\n", at.x,
      at.y, radius, fill);
}

void SvgCanvas::text(SvgPoint at, std::string_view words, const SvgFont& font) {
  fmt::format_to(
      std::back_inserter(text_),
      "<text x=\"{0:.1f}\" y=\"{1:.1f}\" font-size=\"{2:g}\" fill=\"{3}\" text-anchor=\"{4}\"{5}{6}>{7}</text>\n", at.x,
      at.y, font.size, font.colour, name_of(font.anchor), font.bold ? " font-weight=\"bold\"" : "",
      font.rotate == 0 ? "" : fmt::format(" transform=\"rotate({:g} {:.1f} {:.1f})\"", font.rotate, at.x, at.y),
      escaped(words));
}

std::string SvgCanvas::finish() const { return text_ + "</svg>\n"; }

double svg_width(std::string_view words, double font_size) {
  return 0.56 * font_size * static_cast<double>(words.size());
}

AxisTicks axis_ticks(double low, double high, int count) {
  if (!(high > low)) high = low + std::max(std::abs(low), 1.0);
  const double rough = (high - low) / std::max(count, 1), power = std::pow(10.0, std::floor(std::log10(rough)));
  const double digit = rough / power;
  const double step = power * (digit <= 1 ? 1 : digit <= 2 ? 2 : digit <= 5 ? 5 : 10);
  AxisTicks ticks{std::floor(low / step) * step, std::ceil(high / step - 1e-9) * step, step, {}};
  for (int i = 0; i <= static_cast<int>(std::llround((ticks.high - ticks.low) / step)); ++i)
    ticks.values.push_back(ticks.low + i * step);
  return ticks;
}

SvgByteUnit svg_byte_unit(double largest) {
  static constexpr std::array kUnits = {SvgByteUnit{1.0, "B"}, SvgByteUnit{0x1p10, "KiB"}, SvgByteUnit{0x1p20, "MiB"},
                                        SvgByteUnit{0x1p30, "GiB"}};
  SvgByteUnit unit = kUnits[0];
  for (const SvgByteUnit& u : kUnits)
    if (largest >= 2 * u.bytes) unit = u;
  return unit;
}

std::string tick_label(double value, double step) {
  const int decimals = std::clamp(static_cast<int>(std::ceil(-std::log10(step) - 1e-9)), 0, 9);
  return fmt::format("{:.{}f}", std::abs(value) < step / 2 ? 0.0 : value, decimals);
}

void svg_grid(SvgCanvas& canvas, const SvgAxis& across, const SvgAxis& up) {
  const SvgScale &x = across.scale, &y = up.scale;
  for (const double tick : across.ticks.values) {
    canvas.line({x(tick), y.at_low}, {x(tick), y.at_high}, {.colour = kSvgGrid});
    canvas.text({x(tick), y.at_low + 18}, tick_label(tick, across.ticks.step),
                {.size = 11, .colour = kSvgFaint, .anchor = SvgAnchor::Middle});
  }
  for (const double tick : up.ticks.values) {
    canvas.line({x.at_low, y(tick)}, {x.at_high, y(tick)}, {.colour = kSvgGrid});
    canvas.text({x.at_low - 8, y(tick) + 4}, tick_label(tick, up.ticks.step),
                {.size = 11, .colour = kSvgFaint, .anchor = SvgAnchor::End});
  }
}

void svg_axis_titles(SvgCanvas& canvas, const SvgAxis& across, const SvgAxis& up) {
  const SvgScale &x = across.scale, &y = up.scale;
  canvas.text({(x.at_low + x.at_high) / 2, y.at_low + 40}, across.title,
              {.size = 12, .colour = kSvgInk, .anchor = SvgAnchor::Middle});
  canvas.text({x.at_low - 52, (y.at_low + y.at_high) / 2}, up.title,
              {.size = 12, .colour = kSvgInk, .anchor = SvgAnchor::Middle, .rotate = -90});
}

}  // namespace regather
