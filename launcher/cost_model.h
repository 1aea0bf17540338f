// What operations cost on this machine: seconds that were measured for each, by its kind and its work, and what follows
// from them for others. Made by running a few blocks with a recorder (launcher/calibrate.h), kept in a file per
// machine, threads and ranks; the same text gives the same prices on every rank. It measures nothing and plans nothing.
#pragma once
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/device.h"
#include "tensor/recorder.h"
#include "tensor/shape.h"

namespace regather {

// A cost is a property of the machine, and of how much of it a rank has.
struct CostPlace {
  std::string machine;  // processor, number of CPUs, instruction set of the kernels; bf16, if they run on that
  std::int64_t threads = 1, ranks = 1;
};
CostPlace cost_place(std::int64_t threads, std::int64_t ranks, DType compute);

class CostModel {
 public:
  // From the machine's limits alone: every operation takes kFromLimits times as long as its work does at least.
  explicit CostModel(const MachineLimits& limits) : limits_(limits) {}
  static constexpr double kFromLimits = 1.3;

  // One step that was recorded; operations with the same work are averaged. `wire_bytes`: of its collectives.
  struct Step {
    std::span<const Recorder::Interval> intervals;
    double wire_bytes = 0;
  };
  void learn(const std::vector<Step>& steps);
  static CostModel mean(const std::vector<CostModel>& of_ranks);  // of ranks that did the same; at least one
  bool measured() const { return !measured_.empty(); }

  // Of an operation, a copy or an update. Same work: as measured. Other work: as far from its least time as the nearest
  // that was measured under that name. Scopes and communication are free: see below.
  double seconds(const Recorder::Interval& interval) const;
  // Of this rank's own time in collectives: starting, moving on and waiting.
  double communication_seconds(double wire_bytes) const { return seconds_a_wire_byte_ * wire_bytes; }
  // Of copies to the host or back, beside the computation; the thread that does them shares the machine's memory.
  double copy_seconds(Stream direction, double bytes) const;
  void learn_copies(Stream direction, const CopyCounts& counts);  // of a few steps
  // What no operation accounts for, spread over them.
  double overhead_seconds(std::size_t operations) const {
    return overhead_an_operation_ * static_cast<double>(operations);
  }

  std::string to_json(const CostPlace& place) const;
  static CostModel from_json(std::string_view text);  // throws Error

 private:
  struct Sample {
    Work work;
    double seconds;
  };
  static std::string key(const Recorder::Interval& interval);

  MachineLimits limits_;
  std::map<std::string, std::vector<Sample>, std::less<>> measured_;
  double seconds_a_wire_byte_ = 0, overhead_an_operation_ = 0;
  double seconds_to_host_ = 0, seconds_to_device_ = 0;  // of a byte; 0: not measured
};

// Is it an operation, a copy or an update, rather than communication or what is around them?
bool is_operation(const Recorder::Interval& interval);

// The file of a place: below XDG_CACHE_HOME, or ~/.cache. Empty: the environment names neither.
std::filesystem::path cost_file(const CostPlace& place);
// What was measured there; none: nothing was, or elsewhere.
std::optional<CostModel> load_costs(const CostPlace& place);
void save_costs(const CostPlace& place, const CostModel& costs);  // throws Error

}  // namespace regather
