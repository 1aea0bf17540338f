// `regather plan`: what a configuration needs and takes on any number of ranks, before anything is allocated, and what
// else could be kept. Alone it runs on one process, whatever the number of ranks it plans for; with --calibrate every
// rank runs, measures what operations cost here, and keeps that for later plans and runs.
#pragma once
#include <string>

#include "launcher/config.h"
#include "launcher/ranks.h"

namespace regather {

struct PlanOptions {
  std::string name{};      // the configuration's, for titles
  std::int64_t world = 0;  // ranks; 0: those that run, or that the configuration asks for
  double bandwidth = 0;    // bytes a second of the link between ranks; 0: as measured on this machine
  bool calibrate = false;
  std::string json_file{}, picture_file{};  // empty: none
};

// The text to print, when nothing is to be measured. world: not 0.
std::string plan_text(const Config& config, const PlanOptions& options);
// With --calibrate, on every rank. The exit code; errors are handed to `report` on the rank that meets them.
int run_plan(const Config& config, const PlanOptions& options, const ReportError& report);

}  // namespace regather
