// `regather fit`: the longest sequence and the largest micro-batch whose step stays within so much memory a rank, under
// each checkpoint policy, and for which there is text enough. Found by steps without storage, then confirmed: a step is
// trained at the answer under that limit, and the step one larger is refused by the same allocator, with the table of
// who holds what.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "launcher/config.h"
#include "launcher/ranks.h"

namespace regather {

struct FitOptions {
  std::string name{};                   // the configuration's, for titles
  std::int64_t memory = 0;              // bytes a rank
  std::vector<std::string> policies{};  // empty: none, full, budget, and the configuration's own
  enum class Confirm { Yes, No } confirm = Confirm::Yes;
  std::string json_file{};  // empty: none
  double patience = 2;      // seconds that it searches, or trains a step, without saying so
};

// The largest n >= 1 for which fits(n), if a larger one never fits when a smaller one does not; 0: not even 1 does.
std::int64_t largest_that_fits(std::int64_t most, const std::function<bool(std::int64_t)>& fits);

// The exit code: 0, or 3 if nothing fits under any policy, or 1 if a step did not confirm what was planned; errors are
// handed to `report` on the rank that meets them.
int run_fit(const Config& config, const FitOptions& options, const ReportError& report);

}  // namespace regather
