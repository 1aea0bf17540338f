// `regather compare`: the same configuration under several checkpoint policies, in one invocation. Policies take turns
// (rounds), each time with a fresh model, device and high-water marks; a warm-up step is not measured. The loss and all
// gradients of the first step, from the same start values and batch, are compared bit for bit. What is planned not to
// fit is not run: it is a row that says so, the same on all ranks.
// Invariant: what is written (compare.md, compare.json, two pictures) comes from one Comparison. It trains nothing.
#pragma once
#include <string>
#include <vector>

#include "launcher/config.h"
#include "launcher/ranks.h"

namespace regather {

struct CompareOptions {
  std::string name{};                   // the configuration's, for titles
  std::vector<std::string> policies{};  // empty: default_policies()
  std::int64_t steps = 3, rounds = 3;
  std::string json_file{};  // a copy of compare.json goes there; empty: none
  bool overwrite = false;
};

// none, full, every_n_layers, segments, and the configuration's own.
std::vector<std::string> default_policies(const Config& config);
std::string policy_of(const Config& config);
// The configuration under another policy. UsageError: unknown, or not possible with the other keys.
Config with_policy(const Config& config, const std::string& policy);

// The exit code: 0, or 1 if numbers or communication differ, or 3 if no policy fits; errors are handed to `report` on
// the rank that meets them.
int run_compare(const Config& config, const CompareOptions& options, const ReportError& report);

}  // namespace regather
