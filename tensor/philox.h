// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): random numbers as a pure
// function of a key and a counter. There is no state to save: the same key and counter give the same numbers on every
// execution, every rank and every device.
#pragma once
#include <array>
#include <cstdint>

namespace regather {

using PhiloxBlock = std::array<std::uint32_t, 4>;

constexpr PhiloxBlock philox(std::array<std::uint32_t, 2> key, PhiloxBlock counter) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53U} * counter[0], b = std::uint64_t{0xCD9E8D57U} * counter[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key[0] += 0x9E3779B9U;
    key[1] += 0xBB67AE85U;
  }
  return counter;
}

// Folds a word into a 64-bit key (the finaliser of SplitMix64); order matters.
constexpr std::uint64_t mix(std::uint64_t h, std::uint64_t word) {
  h = (h ^ word) + 0x9E3779B97F4A7C15U;
  h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9U;
  h = (h ^ (h >> 27)) * 0x94D049BB133111EBU;
  return h ^ (h >> 31);
}

// Which numbers an operation draws. A batch holds consecutive sequences of the step, beginning with `sequence`: element
// e of the batch's b-th sequence draws bits(b, e), whatever rank or micro-batch holds it.
struct RngKey {
  std::uint64_t seed = 0, step = 0, sequence = 0, block = 0, op = 0;

  std::array<std::uint32_t, 2> words() const {
    const std::uint64_t h = mix(mix(mix(mix(0, seed), step), block), op);
    return {static_cast<std::uint32_t>(h), static_cast<std::uint32_t>(h >> 32)};
  }
  // Four words for elements 4q .. 4q+3 of the b-th sequence.
  PhiloxBlock quad(std::uint64_t b, std::uint64_t q) const {
    const std::uint64_t s = sequence + b;
    return philox(words(), {static_cast<std::uint32_t>(q), static_cast<std::uint32_t>(q >> 32),
                            static_cast<std::uint32_t>(s), static_cast<std::uint32_t>(s >> 32)});
  }
};

}  // namespace regather
