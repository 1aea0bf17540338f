// A Comparison in words: the table, the verdict, compare.md and compare.json. Pure: texts from values.
#pragma once
#include <string>
#include <vector>

#include "launcher/comparison.h"
#include "launcher/text_table.h"

namespace regather {

// Policies are columns.
TextTable comparison_table(const Comparison& comparison);
// One sentence or two a policy, and at last what to take from all of it.
std::vector<std::string> verdict(const Comparison& comparison);
// memory_picture, time_picture: names of the files beside it.
std::string comparison_markdown(const Comparison& comparison, const std::string& memory_picture,
                                const std::string& time_picture);
// Sizes in bytes, times in seconds, shares of 1.
std::string to_json(const Comparison& comparison);

}  // namespace regather
