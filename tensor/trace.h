// What ran, in order: counts and flops always, a line an action when `lines` is asked for. Attached to a Device; costs
// nothing when it is not. Times are the Recorder's.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace regather {

struct Trace {
  enum class Kind { Run, Rerun, Backward };
  bool keep_lines = false;
  std::vector<std::string> lines;  // "run norm", "rerun gelu", "backward add", "gather block 3", "wait block 3"
  std::map<std::string, int, std::less<>> runs, reruns;
  double forward_flops = 0, recomputed_flops = 0;

  void operation(Kind kind, std::string_view name, double flops);
  void line(std::string text) {
    if (keep_lines) lines.push_back(std::move(text));
  }
};

}  // namespace regather
