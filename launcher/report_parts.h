// What the reports of several commands write alike: kinds of memory in one order, bytes in the unit of tables, and
// parts of their JSON files (as text, for the report's own document). It reads and decides nothing.
#pragma once
#include <array>
#include <cstdint>
#include <string>

#include "dist/ledger.h"
#include "tensor/memory.h"

namespace regather {

// In the order of tables: what stays through a step, then what comes and goes.
inline constexpr std::array kKinds = {Tag::Parameters, Tag::Gradients,   Tag::Optimizer,
                                      Tag::Gathered,   Tag::Activations, Tag::Workspace};

std::string mebibytes(std::int64_t bytes);  // "12.3"

// {"parameters": 1, ...}
std::string kinds_json(const BytesByTag& bytes);
// [{"name": "all_gather", "pass": "forward", "unit": "block", "dtype": "fp32", "count": 1, "bytes": 1}, ...]
std::string collectives_json(const Ledger::Entries& entries);

}  // namespace regather
