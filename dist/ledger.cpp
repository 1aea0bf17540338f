#include "dist/ledger.h"

#include <fmt/format.h>

namespace regather {

std::string_view name_of(Collective collective) {
  switch (collective) {
    case Collective::AllGather: return "all_gather";
    case Collective::ReduceScatter: return "reduce_scatter";
    case Collective::AllReduce: return "all_reduce";
    case Collective::Barrier: return "barrier";
  }
  return "?";
}

void Ledger::add(const LedgerKey& key, const LedgerCounts& counts) {
  LedgerCounts& entry = entries_[key];
  entry.count += counts.count;
  entry.logical_bytes += counts.logical_bytes;
  entry.wire_bytes += counts.wire_bytes;
  entry.copied_bytes += counts.copied_bytes;
  entry.seconds += counts.seconds;
}

void Ledger::add_seconds(const LedgerKey& key, double seconds) {
  // A collective of before a reset() may end after it; its entry is not to come back without its count.
  if (const auto it = entries_.find(key); it != entries_.end()) it->second.seconds += seconds;
}

std::int64_t Ledger::wire_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& [key, counts] : entries_) bytes += counts.wire_bytes;
  return bytes;
}

namespace {

std::string describe(const LedgerCounts* counts) {
  if (!counts) return "none";
  return fmt::format("{} x, {} bytes, {} on the wire", counts->count, counts->logical_bytes, counts->wire_bytes);
}

bool same(const LedgerCounts& a, const LedgerCounts& b) {
  return a.count == b.count && a.logical_bytes == b.logical_bytes && a.wire_bytes == b.wire_bytes;
}

}  // namespace

std::vector<std::string> differences(const Ledger::Entries& expected, const Ledger::Entries& measured) {
  std::vector<std::string> lines;
  const auto compare = [&](const LedgerKey& key, const LedgerCounts* want, const LedgerCounts* got) {
    if (want && got && same(*want, *got)) return;
    lines.push_back(fmt::format("{} of {} ({}, {}): expected {}; measured {}", name_of(key.collective), key.unit,
                                name_of(key.pass), name_of(key.dtype), describe(want), describe(got)));
  };
  for (const auto& [key, counts] : expected) {
    const auto it = measured.find(key);
    compare(key, &counts, it == measured.end() ? nullptr : &it->second);
  }
  for (const auto& [key, counts] : measured)
    if (!expected.contains(key)) compare(key, nullptr, &counts);
  return lines;
}

}  // namespace regather
