#include "dist/flat_layout.h"

#include <algorithm>

#include "tensor/error.h"

namespace regather {

FlatLayout::FlatLayout(std::span<const std::int64_t> sizes, int world) : offsets_{0}, world_(world) {
  check(world >= 1, "a layout needs at least one rank, not {}", world);
  for (std::int64_t size : sizes) {
    check(size >= 0, "a parameter has {} elements", size);
    offsets_.push_back(offsets_.back() + size);
  }
  shard_ = (total() + world - 1) / world;
}

std::vector<FlatLayout::Piece> FlatLayout::pieces(int rank) const {
  std::vector<Piece> out;
  const std::int64_t begin = shard_ * rank, end = begin + shard_;
  for (std::size_t p = 0; p + 1 < offsets_.size(); ++p) {
    const std::int64_t first = std::max(begin, offsets_[p]), last = std::min(end, offsets_[p + 1]);
    if (first < last) out.push_back({p, first - offsets_[p], first - begin, last - first});
  }
  return out;
}

}  // namespace regather
