// Where parameters sit in a flat buffer that is cut into `world` equal shards: one after the other in the order of the
// table, without gaps; the last shards are padded, and may be empty of parameters. Pure arithmetic, 64-bit.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace regather {

class FlatLayout {
 public:
  // sizes: elements of each parameter, in order. Any sizes on any number of ranks.
  FlatLayout(std::span<const std::int64_t> sizes, int world);

  std::int64_t offset(std::size_t param) const { return offsets_.at(param); }
  std::int64_t size(std::size_t param) const { return offsets_.at(param + 1) - offsets_.at(param); }
  std::int64_t total() const { return offsets_.back(); }  // elements of all parameters
  std::int64_t shard() const { return shard_; }           // ceil(total / world)
  std::int64_t padded() const { return shard_ * world_; }

  // Which part of which parameters a rank owns.
  struct Piece {
    std::size_t param;
    std::int64_t first;   // within the parameter
    std::int64_t offset;  // within the rank's shard
    std::int64_t size;
  };
  std::vector<Piece> pieces(int rank) const;

 private:
  std::vector<std::int64_t> offsets_;
  std::int64_t shard_;
  int world_;
};

}  // namespace regather
