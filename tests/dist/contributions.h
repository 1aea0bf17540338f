// What the ranks of a test contribute, and the sum in rank order, from plain loops.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace regather::conformance {

inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
// Element i of rank r's contribution number k: of so many magnitudes that the order of a sum shows in its bits.
inline float number(int rank, std::int64_t i, int k = 0) {
  const std::uint64_t h =
      mix(mix(static_cast<std::uint64_t>(rank) * 1000 + static_cast<std::uint64_t>(k)) + static_cast<std::uint64_t>(i));
  const float unit = static_cast<float>(static_cast<double>(h >> 40) / 8388608.0 - 1.0);
  return std::ldexp(unit, static_cast<int>(h % 20) - 10);
}
inline std::vector<float> numbers(int rank, std::int64_t n, int k = 0) {
  std::vector<float> v(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) v[static_cast<std::size_t>(i)] = number(rank, i, k);
  return v;
}
inline float sum_over_ranks(int ranks, std::int64_t i, int k = 0) {
  float sum = number(0, i, k);
  for (int r = 1; r < ranks; ++r) sum += number(r, i, k);
  return sum;
}
inline std::vector<float> sums(int ranks, std::int64_t begin, std::int64_t n, int k = 0) {
  std::vector<float> v;
  for (std::int64_t i = begin; i < begin + n; ++i) v.push_back(sum_over_ranks(ranks, i, k));
  return v;
}
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}
inline std::byte byte_of(int rank, std::size_t i, int k) {
  return static_cast<std::byte>(mix(static_cast<std::uint64_t>(rank * 7919 + k) + (i << 20)) & 0xff);
}

}  // namespace regather::conformance
