// `regather check`: everything that `train` would refuse before its first step, and what it would run if there is
// nothing. That the output folder holds files is said, not refused. One process answers for any number of ranks; it
// makes no file but the JSON that was asked for.
#pragma once
#include <cstdint>
#include <string>

#include "launcher/config.h"
#include "launcher/ranks.h"

namespace regather {

struct CheckOptions {
  std::string name{};       // the configuration's, as it was given
  std::string json_file{};  // empty: none
  bool overwrite = false;   // an output that holds an earlier run is allowed
};

// The text to print.
std::string check_text(const Config& config, const CheckOptions& options, const LaunchPlace& place);

// How many ranks a configuration is checked and planned for: those that were started, else those that it asks for.
std::int64_t ranks_of(const Config& config, const LaunchPlace& place);

}  // namespace regather
