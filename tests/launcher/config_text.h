// Configurations as text, and what they are refused with.
#pragma once
#include <gtest/gtest.h>

#include "launcher/config.h"

namespace regather::testing {

inline const std::string kData = "data:\n  files: [a.txt]\n";

inline Config parse(const std::string& text, std::vector<std::string> sets = {}) {
  return parse_config(text, "c.yaml", sets);
}

// The lines of what a configuration is refused with; empty if it is taken.
inline std::vector<std::string> refusals(const std::string& text, std::vector<std::string> sets = {}) {
  try {
    parse(text, std::move(sets));
  } catch (const UsageError& e) {
    EXPECT_EQ(e.code(), ExitCode::Usage);
    std::vector<std::string> lines(1);
    for (const char* c = e.what(); *c != '\0'; ++c) {
      if (*c == '\n') {
        lines.emplace_back();
      } else {
        lines.back() += *c;
      }
    }
    return lines;
  }
  return {};
}
using Lines = std::vector<std::string>;

inline std::string refusal(const std::string& text, std::vector<std::string> sets = {}) {
  const Lines lines = refusals(text, std::move(sets));
  EXPECT_EQ(lines.size(), 1U) << ::testing::PrintToString(lines);
  return lines.empty() ? "" : lines[0];
}

inline std::string with_checkpointing(const std::string& key_value) {
  return kData + "activation_checkpointing:\n  " + key_value + "\n";
}
inline std::string with_train(const std::string& key_value) { return kData + "train:\n  " + key_value + "\n"; }

}  // namespace regather::testing
