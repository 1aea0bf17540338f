// A planned step in words, as JSON and as a picture. Pure: texts from values.
#pragma once
#include <string>

#include "launcher/forecast.h"
#include "launcher/keep_plan.h"

namespace regather {

struct PlanReport {
  std::string name, model, batch, sharding, checkpointing;  // in words
  std::int64_t world = 1, memory_limit = 0;
  std::vector<SavePlan> blocks;  // what each keeps
  bool segments = false;         // blocks also give up inputs
  StepForecast forecast;
  std::string machine = "this machine";  // what is priced
  enum class Prices { Measured, FromLimits } prices = Prices::FromLimits;
  double bandwidth = 0;  // of the link that was assumed; 0: none
  KeepPlan keep;         // what could be planned; `chosen`: what is, under policy budget
};

std::string plan_words(const PlanReport& report);
// Sizes in bytes, times in seconds.
std::string to_json(const PlanReport& report);
// Seconds of a step against activation bytes: everything that could be planned, and what is.
std::string plan_picture(const PlanReport& report);

}  // namespace regather
