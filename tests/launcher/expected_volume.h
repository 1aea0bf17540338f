// Closed forms of a step's communication, for the tests: arithmetic alone.
// L blocks, M micro-batches, D slots, S segments of K blocks.
#pragma once
#include <cstdint>

#include "model/config.h"

namespace regather::testing {

inline std::int64_t batch_major_gathers(std::int64_t L, std::int64_t M, std::int64_t D) {
  return L + (2 * M - 1) * (L - D);
}
inline std::int64_t segment_gathers(std::int64_t L, std::int64_t M, std::int64_t D, std::int64_t S, std::int64_t K) {
  return L + (M - 1) * (L - D) + M * ((K - D) + (S - 1) * (2 * K - D));
}

// Elements per rank of a GPT-2's units: the padded 1/W share.
struct UnitSizes {
  UnitSizes(const ModelConfig& m, std::int64_t world) {
    const auto share = [&](std::int64_t elements) { return (elements + world - 1) / world; };
    block_shard = share(12 * m.hidden * m.hidden + 13 * m.hidden);
    table_shard = share(m.vocab * m.hidden);
    positions_shard = share(m.max_sequence * m.hidden);
    head_shard = share(2 * m.hidden);
  }
  std::int64_t block_shard, table_shard, positions_shard, head_shard;
  std::int64_t all(std::int64_t layers) const {
    return layers * block_shard + table_shard + positions_shard + head_shard;
  }
};

}  // namespace regather::testing
