// What ran, in order: counts and flops always, a line an action when `lines` is asked for. Attached to a Device; costs
// nothing when it is not. Times are the Recorder's.
#pragma once
#include <functional>
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
  // Is the gather of what runs now in flight? Set by whoever knows; reruns that begin meanwhile are hidden by it.
  std::function<bool()> in_flight;
  double hidden_seconds = 0;  // of such reruns, without the time that they wait for it
  double waited_seconds = 0;  // for parameters that were not there yet

  void operation(Kind kind, std::string_view name, double flops);
  void line(std::string text) {
    if (keep_lines) lines.push_back(std::move(text));
  }
};

// A rerun, from construction to destruction: hidden if the gather is in flight when it begins.
class Shadowed {
 public:
  explicit Shadowed(Trace* trace);
  ~Shadowed();
  Shadowed(const Shadowed&) = delete;
  Shadowed& operator=(const Shadowed&) = delete;

 private:
  Trace* trace_;
  double begin_ = 0, waited_ = 0;
};

// The computation waits for parameters, from construction to destruction.
class Waiting {
 public:
  explicit Waiting(Trace* trace);
  ~Waiting();
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  Trace* trace_;
  double begin_ = 0;
};

}  // namespace regather
