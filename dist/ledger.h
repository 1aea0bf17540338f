// Every collective of a rank, counted: the proof of what was communicated. Always on. Written by Communicator's public
// methods only. With W ranks and shards of s bytes:
//   all_gather       logical W s, wire (W-1) s received, for each buffer; buffers of one element type are one entry
//   reduce_scatter   logical W s, wire (W-1) s sent
//   all_reduce       logical W s, wire 2 (W-1) s: both of the above. n scalars: logical 8 n, wire 8 n (W-1) received
//   barrier          no bytes; element type int32
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "dist/pass.h"
#include "tensor/shape.h"

namespace regather {

enum class Collective { AllGather, ReduceScatter, AllReduce, Barrier };
std::string_view name_of(Collective collective);  // "all_gather", ...

struct LedgerKey {
  Collective collective;
  std::string unit;  // "block" for every block, the name for root units, "scalars" for a step's scalars
  Pass pass;
  DType dtype;
  auto operator<=>(const LedgerKey&) const = default;
};
struct LedgerCounts {
  std::int64_t count = 0, logical_bytes = 0, wire_bytes = 0, copied_bytes = 0;
  double seconds = 0;  // of this rank's time inside the collective; not part of a comparison
};

class Ledger {
 public:
  using Entries = std::map<LedgerKey, LedgerCounts>;
  void add(const LedgerKey& key, const LedgerCounts& counts);
  void add_seconds(const LedgerKey& key, double seconds);
  const Entries& entries() const { return entries_; }
  void reset() { entries_.clear(); }
  std::int64_t wire_bytes() const;

 private:
  Entries entries_;
};

// Empty if count, logical and wire bytes agree in every entry; otherwise one line per difference, both sides in each.
std::vector<std::string> differences(const Ledger::Entries& expected, const Ledger::Entries& measured);

}  // namespace regather
