// One rank's part of a comparison: runs each policy by turns and combines what the ranks measured. Collective; every
// rank gets the same Comparison but for the timeline, which is its own. Invariant: what collectives may still use after
// an error lives as long as this object. It writes nothing.
#pragma once
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "launcher/compare.h"
#include "launcher/comparison.h"
#include "launcher/training_run.h"

namespace regather {

class PolicyMeasurement {
 public:
  using Say = std::function<void(std::string_view)>;  // a line of progress
  // stop_asked: see TrainerOptions.
  PolicyMeasurement(const Config& config, const CompareOptions& options, Communicator& comm, Say say,
                    std::function<bool()> stop_asked = {});
  ~PolicyMeasurement();
  // Of as many rounds as were completed before it was asked to stop; without any, an error.
  Comparison run();

 private:
  struct Attempt;      // a fresh device and model in training
  struct Differences;  // to the first policy that ran

  Comparison begin() const;
  void plan(PolicyResult& result, const Config& config);
  std::string settle(Config& config);
  enum class Measured { All, Stopped };
  Measured measure(PolicyResult& result, const Config& config, std::int64_t round);
  void compare_gradients(Differences& differences);
  void compare_losses(const std::vector<double>& losses, Differences& differences);
  void record_a_step(PolicyResult& result);

  const Config& config_;
  const CompareOptions& options_;
  Communicator& comm_;
  Say say_;
  std::function<bool()> stop_asked_;
  RunInputs inputs_;
  std::unique_ptr<Attempt> attempt_;
  std::vector<float> reference_gradients_;  // of the elements that this rank holds
  std::vector<double> reference_losses_;    // empty: this is the first policy that runs
};

}  // namespace regather
