// Start values. Element i of a parameter called `name`, for a given seed:
//   key     = mix(mix(kInitDomain, seed), fnv1a64(name)), low word first
//   w0..w3  = philox(key, {low word of i / 4, high word of i / 4, 0, 0})
//   a, b    = (w0, w1) if i % 4 < 2, else (w2, w3)
//   r       = sqrt(-2 ln((a + 0.5) / 2^32)),  t = 2 pi b / 2^32                       (Box-Muller, in double)
//   value   = float(double(std) * r * (cos t if i is even, sin t if i is odd))
// and of a uniform one, with w of i % 4:
//   value   = float(double(bound) * (w / 2^31 - 1))
// So any range can be made on its own, on any rank. tests/golden/ makes the same numbers in numpy.
#include <cmath>
#include <numbers>

#include "tensor/params.h"
#include "tensor/philox.h"

namespace regather {
namespace {

constexpr std::uint64_t kInitDomain = 0x696E697469616C69U;  // keeps these draws apart from all others of the same seed

constexpr std::uint64_t fnv1a64(std::string_view text) {
  std::uint64_t h = 0xCBF29CE484222325U;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3U;
  return h;
}

struct Pair {
  double even, odd;
};
Pair box_muller(std::uint32_t a, std::uint32_t b) {
  const double r = std::sqrt(-2.0 * std::log((static_cast<double>(a) + 0.5) * 0x1p-32));
  const double t = 2.0 * std::numbers::pi * (static_cast<double>(b) * 0x1p-32);
  return {r * std::cos(t), r * std::sin(t)};
}

// The words of a parameter's elements, by fours.
class Words {
 public:
  Words(const ParamInfo& info, std::uint64_t seed) {
    const std::uint64_t h = mix(mix(kInitDomain, seed), fnv1a64(info.name));
    key_ = {static_cast<std::uint32_t>(h), static_cast<std::uint32_t>(h >> 32)};
  }
  PhiloxBlock of(std::int64_t i) const {
    const auto quad = static_cast<std::uint64_t>(i / 4);
    return philox(key_, {static_cast<std::uint32_t>(quad), static_cast<std::uint32_t>(quad >> 32), 0, 0});
  }

 private:
  std::array<std::uint32_t, 2> key_{};
};

void fill_uniform(const ParamInfo& info, std::uint64_t seed, std::int64_t first, std::int64_t n, float* out) {
  const Words words(info, seed);
  const auto bound = static_cast<double>(info.init.bound);
  for (std::int64_t i = first; i < first + n; ++i) {
    const std::uint32_t w = words.of(i)[static_cast<std::size_t>(i % 4)];
    out[i - first] = static_cast<float>(bound * (static_cast<double>(w) * 0x1p-31 - 1.0));
  }
}

void fill_normal(const ParamInfo& info, std::uint64_t seed, std::int64_t first, std::int64_t n, float* out) {
  const Words words(info, seed);
  const auto std_dev = static_cast<double>(info.init.std);
  for (std::int64_t i = first - first % 2; i < first + n; i += 2) {
    const PhiloxBlock w = words.of(i);
    const Pair z = i % 4 == 0 ? box_muller(w[0], w[1]) : box_muller(w[2], w[3]);
    if (i >= first) out[i - first] = static_cast<float>(std_dev * z.even);
    if (i + 1 < first + n) out[i + 1 - first] = static_cast<float>(std_dev * z.odd);
  }
}

}  // namespace

void initialize(const ParamInfo& info, std::uint64_t seed, std::int64_t first, std::int64_t n, float* out) {
  check(first >= 0 && n >= 0 && first + n <= info.shape.numel(), "initialize {}: elements {} to {} of {}", info.name,
        first, first + n, info.shape.numel());
  switch (info.init.kind) {
    case Init::Kind::Zeros: std::fill_n(out, n, 0.0F); return;
    case Init::Kind::Ones: std::fill_n(out, n, 1.0F); return;
    case Init::Kind::Normal: fill_normal(info, seed, first, n, out); return;
    case Init::Kind::Uniform: fill_uniform(info, seed, first, n, out); return;
  }
}

}  // namespace regather
