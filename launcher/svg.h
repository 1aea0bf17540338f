// SVG as text: a canvas of shapes and writing, and the scales of axes. Generic fonts, a light background, nothing
// that runs. Coordinates are pixels, y downwards. It knows nothing of what is drawn.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace regather {

struct SvgPoint {
  double x, y;
};

enum class SvgAnchor { Start, Middle, End };
struct SvgFont {
  double size = 12;
  std::string_view colour = "#333333";
  SvgAnchor anchor = SvgAnchor::Start;
  bool bold = false;
  double rotate = 0;  // degrees, about the point
};
struct SvgLine {
  std::string_view colour = "#333333";
  double width = 1;
  std::string_view dashes{};  // "4 3"; empty: none
};

class SvgCanvas {
 public:
  // title, description: for readers that do not see it.
  SvgCanvas(double width, double height, std::string_view title, std::string_view description);
  void rectangle(double x, double y, double width, double height, std::string_view fill);
  void line(SvgPoint from, SvgPoint to, const SvgLine& style);
  void polygon(const std::vector<SvgPoint>& points, std::string_view fill);
  void circle(SvgPoint at, double radius, std::string_view fill);
  void text(SvgPoint at, std::string_view words, const SvgFont& font);
  std::string finish() const;

 private:
  std::string text_;
};

// About how wide words are in a generic sans-serif font.
double svg_width(std::string_view words, double font_size);

// Round numbers along [low, high]: about `count` of them, at 1, 2 or 5 times a power of ten.
struct AxisTicks {
  double low, high, step;  // low and high are multiples of step, and enclose what was given
  std::vector<double> values;
};
AxisTicks axis_ticks(double low, double high, int count);
// A value at one of these ticks, with as many decimals as the step needs.
std::string tick_label(double value, double step);

// Bytes on an axis: one unit for all of it.
struct SvgByteUnit {
  double bytes;
  std::string_view name;
};
SvgByteUnit svg_byte_unit(double largest);

// A linear scale from values to pixels.
struct SvgScale {
  double low, high, at_low, at_high;
  double operator()(double value) const { return at_low + (value - low) / (high - low) * (at_high - at_low); }
};

// Lines of a grid at the ticks, inside the scales, with the ticks' labels outside; and what the axes are called.
struct SvgAxis {
  SvgScale scale;
  AxisTicks ticks;
  std::string title;
};
void svg_grid(SvgCanvas& canvas, const SvgAxis& across, const SvgAxis& up);
void svg_axis_titles(SvgCanvas& canvas, const SvgAxis& across, const SvgAxis& up);

// The colours that pictures share.
inline constexpr std::string_view kSvgInk = "#2b2f36", kSvgFaint = "#6b727d", kSvgGrid = "#e4e7eb",
                                  kSvgPanel = "#fafbfc", kSvgLimit = "#b3261e", kSvgPoint = "#e07b39",
                                  kSvgOther = "#4c6a92";

}  // namespace regather
