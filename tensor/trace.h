// What ran, in order: counts and flops always, a line an action when `lines` is asked for, seconds when `timed`.
// Attached to a Device; costs nothing when it is not.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace regather {

struct Trace {
  enum class Kind { Run, Rerun, Backward };
  struct Span {
    Kind kind;
    std::string name;
    double begin, seconds, flops;
  };
  bool keep_lines = false, timed = false;
  std::vector<std::string> lines;  // "run norm", "rerun gelu", "backward add", "gather block 3", "wait block 3"
  std::map<std::string, int, std::less<>> runs, reruns;
  double forward_flops = 0, recomputed_flops = 0;
  std::vector<Span> spans;  // when timed; seconds of the steady clock

  void line(std::string text) {
    if (keep_lines) lines.push_back(std::move(text));
  }
};

// One operation, from construction to destruction.
class Traced {
 public:
  Traced(Trace* trace, Trace::Kind kind, std::string_view name, double flops);
  ~Traced();
  Traced(const Traced&) = delete;
  Traced& operator=(const Traced&) = delete;

 private:
  Trace* trace_;
  Trace::Span span_{};
};

}  // namespace regather
