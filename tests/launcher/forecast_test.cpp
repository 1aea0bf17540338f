// What a step is predicted to take on a link of a stated bandwidth.
#include "launcher/forecast.h"

#include <gtest/gtest.h>

namespace regather {
namespace {

const CostModel kCosts(MachineLimits{1e10, 1e10});

StepForecast forecast(const Config& config, double bandwidth) {
  return forecast_step(config, make_model(config.model), 0, 4, {.costs = &kCosts, .bandwidth = bandwidth});
}

Config config_with(const std::string& sharding) {
  return parse_config(
      "data: {files: [a], sequence: 64}\nmodel: {layers: 4, hidden: 64, heads: 2}\nsharding: {" + sharding + "}\n",
      "c.yaml");
}

double bytes_of(const StepForecast& f, Collective collective) {
  double bytes = 0;
  for (const auto& [key, counts] : f.collectives)
    if (key.collective == collective) bytes += static_cast<double>(counts.wire_bytes);
  return bytes;
}

TEST(Bandwidth, WhatIsGatheredAtItsUseIsWaitedForWhole) {
  const Config config = config_with("resident_slots: 1, prefetch: 0");
  for (const double bandwidth : {1e6, 1e8, 1e10}) {
    const StepForecast f = forecast(config, bandwidth);
    const double gathers = bytes_of(f, Collective::AllGather) / bandwidth,
                 reductions = bytes_of(f, Collective::ReduceScatter) / bandwidth;
    EXPECT_GE(f.seconds.communication, gathers * (1 - 1e-9));
    EXPECT_LE(f.seconds.communication, gathers + reductions + 1e-9) << "reductions run beside the backwards";
    // The other parts are those of any link.
    const StepForecast other = forecast(config, 1e12);
    EXPECT_NEAR(f.seconds.total() - f.seconds.communication, other.seconds.total() - other.seconds.communication, 1e-9);
  }
}

TEST(Bandwidth, ASlowLinkTakesItsBytesLessWhatIsComputedMeanwhile) {
  const Config config = config_with("resident_slots: 2");
  const StepForecast slow = forecast(config, 1e5);
  const double transfers = (bytes_of(slow, Collective::AllGather) + bytes_of(slow, Collective::ReduceScatter)) / 1e5,
               computed = slow.seconds.total() - slow.seconds.communication;
  EXPECT_GE(slow.seconds.communication, transfers - computed);
  EXPECT_LT(slow.seconds.communication, transfers);
  double before = slow.seconds.communication;
  for (const double bandwidth : {2e5, 1e7, 1e9, 1e11}) {  // never more on a faster one, and in the end nothing
    const double seconds = forecast(config, bandwidth).seconds.communication;
    EXPECT_LT(seconds, before);
    before = seconds;
  }
  EXPECT_LT(before, 1e-3);
}

TEST(Bandwidth, GathersAheadAreHiddenBehindWhatIsComputed) {
  const StepForecast at_use = forecast(config_with("resident_slots: 2, prefetch: 0"), 1e9),
                     ahead = forecast(config_with("resident_slots: 2, prefetch: 1"), 1e9);
  EXPECT_EQ(at_use.wire_bytes, ahead.wire_bytes);
  EXPECT_LT(ahead.seconds.communication, at_use.seconds.communication);
}

}  // namespace
}  // namespace regather
