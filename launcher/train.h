// `regather train`: everything between a valid configuration and the exit code of a rank. Under mpirun or srun every
// rank calls it. It writes the run's folder (summary.h) and reports progress; errors leave it as exceptions, for main
// to print.
#pragma once
#include <string>

#include "launcher/config.h"
#include "launcher/ranks.h"

namespace regather {

struct TrainOptions {
  std::string json_file;  // a copy of summary.json goes there; empty: none
  bool overwrite = false;
  bool profile = false;  // where the time went: tables, profile.json, trace.json
};

// The exit code; errors are handed to `report` on the rank that meets them.
int run_training(const Config& config, const TrainOptions& options, const ReportError& report);

}  // namespace regather
