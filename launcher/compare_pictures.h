// A Comparison in pictures, as SVG. Pure: texts from values.
#pragma once
#include <string>

#include "launcher/comparison.h"

namespace regather {

// The memory of a rank over one step, stacked by kind: one panel a policy, on shared scales.
std::string memory_picture(const Comparison& comparison);
// Seconds of a step against peak memory: one labelled point a policy.
std::string time_picture(const Comparison& comparison);

}  // namespace regather
