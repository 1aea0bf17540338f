// What a search for sizes found, as plain values, and what is said of it: tables, reasons, JSON. It searches nothing.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "launcher/fit.h"
#include "launcher/text_table.h"

namespace regather {

enum class FitSize { Sequence, MicroBatch };
std::string_view name_of(FitSize what);
enum class FitBound { Memory, Text, Search };
std::string_view name_of(FitBound bound);

inline constexpr const char* kNotAskedFor = "not asked for";

struct FitAnswer {
  FitSize what = FitSize::Sequence;
  std::int64_t largest = 0;  // 0: not even 1 fits
  FitBound bound = FitBound::Memory;
  std::int64_t planned = 0, measured = 0;
  double seconds = 0;         // of a step, predicted
  std::string refused{};      // what is said to one more: by the allocator, or of the text
  std::string unconfirmed{};  // why no step was run
  bool confirmed() const { return largest == 0 || !unconfirmed.empty() || measured == planned; }
};

struct PolicyFit {
  std::string policy;
  FitAnswer sequence, micro_batch;
};

TextTable fit_table(const std::vector<PolicyFit>& fits, FitSize what, const Config& config);
// A line each; what is said of the text, which is the same under every policy, once. The table of who holds what is in
// the file of --json.
std::string refusals(const std::vector<PolicyFit>& fits);
std::string to_json(const std::vector<PolicyFit>& fits, const FitOptions& options, std::int64_t world);

}  // namespace regather
