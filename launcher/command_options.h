// What was typed: the command, its file and its options, each checked by itself. It reads no file and runs nothing.
#pragma once
#include <string>
#include <vector>

#include "launcher/compare.h"
#include "launcher/fit.h"
#include "launcher/plan.h"
#include "launcher/train.h"

namespace regather {

struct Arguments {
  enum class Command { Help, Version, Train, Compare, Plan, Fit, Check, HelpOnKey, Markdown } command = Command::Help;
  std::string config, key;
  std::vector<std::string> sets;
  TrainOptions train;
  CompareOptions compare;
  PlanOptions plan;
  FitOptions fit;
};

// Throws UsageError: what is not known, with the nearest name; what has no value, or a wrong one; what is missing.
Arguments parse_arguments(int argc, char** argv);

}  // namespace regather
