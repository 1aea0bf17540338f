// `regather train --profile`: where the time of a step went. Before training it measures what the machine can do, with
// all ranks at once; then it records every step but the first ones, which warm up. Invariant: the rows of a rank add up
// to the time it measured. It changes no number of the training, and prints and writes nothing itself
// (profile_report.h, trace_file.h).
#pragma once
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dist/communicator.h"
#include "tensor/device.h"
#include "tensor/recorder.h"

namespace regather {

// What a rank's thread did, summed over the recorded steps; intervals of one activity and name.
struct ProfileRow {
  Recorder::Activity activity = Recorder::Activity::Rest;
  std::string name{};
  double calls = 0, seconds = 0;  // without what happened inside: waiting, copies
  Work work{};
  double least_seconds = 0;  // at this rank's limits
};
struct CollectiveRow {
  std::string name{};  // "all_gather of block (forward)"
  double calls = 0, bytes = 0;
  double flight_seconds = 0;  // from start to completion
  double waited_seconds = 0;  // of the thread that computes
};
struct RankProfile {
  MachineLimits limits{};
  double seconds = 0;       // all of the loop around a step, evaluation left out
  double step_seconds = 0;  // of it, Trainer::step: what summary.json reports
  std::vector<ProfileRow> rows{};
  std::vector<CollectiveRow> collectives{};
};

// Of all ranks, for one step: every number is divided by the steps.
struct Profile {
  std::int64_t steps = 0;
  std::vector<RankProfile> ranks{};
};
RankProfile mean_of_ranks(const Profile& profile);
double waited_seconds(const RankProfile& profile);

struct RunDevice;  // launcher/run_device.h

class Profiler {
 public:
  static constexpr std::int64_t kWarmUpSteps = 2;  // the second still checks that every parameter learns
  static constexpr std::int64_t kTracedSteps = 5;  // in the trace file; sums are over all

  // Collective: measures the limits of a CPU for half a second.
  Profiler(const RunDevice& run, DType compute, Communicator& comm);

  // While it lives, what this rank does is recorded as part of `step`. profiler: null for none.
  class Window {
   public:
    Window(Profiler* profiler, std::int64_t step);
    ~Window();
    Window(const Window&) = delete;
    Window& operator=(const Window&) = delete;

   private:
    Profiler* profiler_;
    Timed whole_;
  };
  void end_step(std::int64_t step);

  const MachineLimits& limits() const { return limits_; }  // the mean over the ranks
  // Collective; rank 0 gets the result, the others nothing.
  std::optional<Profile> profile();
  // The same: the trace file of all ranks.
  std::optional<std::string> trace();

 private:
  Device& device_;
  Communicator& comm_;
  Recorder recorder_;
  MachineLimits own_limits_, limits_;
  Recorder::Time zero_{};  // where the trace begins, on this rank's clock
  std::int64_t steps_ = 0;
  RankProfile sums_;
  std::map<std::pair<Recorder::Activity, std::string>, ProfileRow> rows_;
  std::map<std::string, CollectiveRow> collectives_;
  std::vector<Recorder::Recording> traced_;
};

}  // namespace regather
