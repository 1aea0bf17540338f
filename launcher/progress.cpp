#include "launcher/progress.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>

namespace regather {
namespace {

constexpr std::string_view kBold = "\033[1m", kGreen = "\033[32m", kYellow = "\033[33m", kOff = "\033[0m";
constexpr std::string_view kClearLine = "\r\033[K";

int width_of(std::FILE* out) {
  winsize size{};
  if (::ioctl(::fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

}  // namespace

namespace {
template <class Round>
std::string in_units(std::int64_t bytes, Round round) {
  static constexpr std::array<std::string_view, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  auto value = static_cast<double>(bytes);
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  if (unit == 0) return fmt::format("{} B", bytes);
  return fmt::format("{:.1f} {}", round(10 * value) / 10, kUnits[unit]);
}
}  // namespace

std::string human_bytes(std::int64_t bytes) {
  return in_units(bytes, [](double x) { return std::round(x); });
}
std::string at_least_bytes(std::int64_t bytes) {
  return in_units(bytes, [](double x) { return std::ceil(x); });
}

std::string human_seconds(double seconds) {
  const auto s = static_cast<std::int64_t>(std::llround(std::clamp(seconds, 0.0, 1e9)));
  if (s >= 3600) return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

namespace {

// Open MPI gives every rank a terminal of its own and copies what it reads there to mpirun's output: what counts is
// whether that is a terminal. Where mpirun is not this process's parent (on another node), it is not.
bool launcher_shows_a_terminal(int descriptor) {
  if (std::getenv("OMPI_COMM_WORLD_RANK") == nullptr) return true;
  const std::string path = fmt::format("/proc/{}/fd/{}", ::getppid(), descriptor);
  const int parents = ::open(path.c_str(), O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
  if (parents < 0) return false;
  const bool terminal = ::isatty(parents) != 0;
  ::close(parents);
  return terminal;
}

}  // namespace

Terminal terminal_of(std::FILE* out) {
  const int descriptor = ::fileno(out);
  if (::isatty(descriptor) == 0 || !launcher_shows_a_terminal(descriptor)) return Terminal::No;
  const char* no_color = std::getenv("NO_COLOR");
  const char* term = std::getenv("TERM");
  if (term == nullptr || std::string_view(term) == "dumb") return Terminal::No;
  return no_color != nullptr && *no_color != '\0' ? Terminal::Plain : Terminal::Colour;
}

double without_sign_of_nan(double value) { return std::isnan(value) ? std::abs(value) : value; }

std::string step_line(const StepMetrics& m, std::int64_t steps) {
  return fmt::format("step {}/{}  loss {:.4f}  grad_norm {:.4f}  lr {:.2e}  {:.0f} tok/s{}", m.step, steps,
                     without_sign_of_nan(m.loss), without_sign_of_nan(m.grad_norm), m.lr, m.tokens_per_second(),
                     m.skipped ? "  skipped" : "");
}

Progress::Progress(std::FILE* out, Terminal terminal, std::int64_t steps, int columns)
    : out_(out), terminal_(terminal), steps_(steps), columns_(columns) {}

Progress::~Progress() { finish(); }

void Progress::banner(std::string_view text) {
  std::fputs(std::string(text).c_str(), out_);
  std::fflush(out_);
}

void Progress::step(const StepMetrics& metrics) {
  last_ = metrics;
  if (metrics.step > 1) {
    seconds_ += metrics.seconds;
    ++timed_steps_;
  }
  if (terminal_ == Terminal::No) {
    note(step_line(metrics, steps_));
    return;
  }
  if (metrics.skipped) note(fmt::format("step {}: skipped, numbers are not finite", metrics.step));
  draw();
}

void Progress::evaluation(const EvalMetrics& metrics) {
  note(fmt::format("step {}/{}  eval_loss {:.4f}  {:.1f} s", metrics.step, steps_, without_sign_of_nan(metrics.loss),
                   metrics.seconds));
}

void Progress::note(std::string_view line) {
  const bool redraw = drawn_;
  clear();
  std::fputs(fmt::format("{}\n", line).c_str(), out_);
  if (redraw) draw();
  std::fflush(out_);
}

void Progress::finish() {
  if (drawn_) std::fputs("\n", out_);
  drawn_ = false;
  std::fflush(out_);
}

void Progress::clear() {
  if (drawn_) std::fputs(std::string(kClearLine).c_str(), out_);
  drawn_ = false;
}

void Progress::draw() {
  std::fputs(fmt::format("{}{}", kClearLine, bar_line()).c_str(), out_);
  std::fflush(out_);
  drawn_ = true;
}

// [#####.....] 10/50  loss 3.1234  12345 tok/s  87.5 MiB  0:40 left. The bar takes what the numbers leave, if that is
// enough.
std::string Progress::bar_line() const {
  const double of_step = timed_steps_ > 0 ? seconds_ / static_cast<double>(timed_steps_) : last_.seconds;
  const std::string left = human_seconds(of_step * static_cast<double>(steps_ - last_.step));
  std::string numbers =
      fmt::format(" {}/{}  loss {:.4f}  {:.0f} tok/s  {}  {} left", last_.step, steps_, without_sign_of_nan(last_.loss),
                  last_.tokens_per_second(), human_bytes(last_.peak_bytes), left);
  const auto width = static_cast<std::size_t>(std::max(columns_ > 0 ? columns_ : width_of(out_), 20)) - 1;
  if (numbers.size() + 8 > width) return numbers.substr(1, width);
  const std::size_t cells = std::min<std::size_t>(40, width - numbers.size() - 2);
  const double done = static_cast<double>(last_.step) / static_cast<double>(std::max<std::int64_t>(steps_, 1));
  const auto full = static_cast<std::size_t>(std::clamp(done, 0.0, 1.0) * static_cast<double>(cells));
  const bool colour = terminal_ == Terminal::Colour;
  return fmt::format("[{}{}{}{}]{}{}{}", colour ? kGreen : "", std::string(full, '#'), colour ? kOff : "",
                     std::string(cells - full, '.'), colour ? kBold : "", numbers, colour ? kOff : "");
}

}  // namespace regather
