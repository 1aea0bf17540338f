// What a warp does as one with bf16: products of fragments, and matrices from shared memory to registers. The lane that
// comes last computes for all, while the others wait.
#include <fmt/format.h>

#include "tests/cuda_emu/grid.h"
#include "tests/cuda_emu/sanitizers.h"

namespace cuda_emu {
namespace {

float widened(std::uint32_t pair, int which) {
  return std::bit_cast<float>((which == 0 ? pair << 16 : pair) & 0xffff0000U);
}

struct Operands {
  float* c;
  const std::uint32_t *a, *b;
};
void multiply(const WarpValues& lanes) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& o = *reinterpret_cast<const Operands*>(lanes[static_cast<std::size_t>(lane)]);
    const int g = lane / 4, c = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) {
      for (int r = 0; r < 4; ++r) a[g + r % 2 * 8][c + r / 2 * 8 + i] = widened(o.a[r], i);
      for (int r = 0; r < 2; ++r) b[c + r * 8 + i][g] = widened(o.b[r], i);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* c = reinterpret_cast<const Operands*>(lanes[static_cast<std::size_t>(lane)])->c;
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 16; ++k) c[i] += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
  }
}

struct Rows {
  std::uint32_t* r;
  const std::uint16_t* row;
};
std::uint32_t element(const WarpValues& lanes, int matrix, int row, int col) {
  return reinterpret_cast<const Rows*>(lanes[static_cast<std::size_t>(8 * matrix + row)])->row[col];
}
template <bool kTransposed>
void distribute(const WarpValues& lanes) {
  for (int lane = 0; lane < 32; ++lane) {
    std::uint32_t* r = reinterpret_cast<const Rows*>(lanes[static_cast<std::size_t>(lane)])->r;
    const int g = lane / 4, c = lane % 4 * 2;
    for (int m = 0; m < 4; ++m)
      r[m] = kTransposed ? element(lanes, m, c, g) | element(lanes, m, c + 1, g) << 16
                         : element(lanes, m, g, c) | element(lanes, m, g, c + 1) << 16;
  }
}

}  // namespace

std::uint16_t bf16_bits(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (std::isnan(x)) return 0x7fff;
  return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

void warp_multiply(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], Place place) {
  const DeviceCall call;
  Operands mine{c, a, b};
  call.grid.as_one_warp(&mine, multiply, place);
}

void warp_load_matrices(std::uint32_t (&r)[4], const void* row, Transposed transposed, Place place) {
  reads(row, 16);
  const DeviceCall call;
  Grid& grid = call.grid;
  grid.check_shared(row, 16, place);
  Rows mine{r, static_cast<const std::uint16_t*>(row)};
  grid.as_one_warp(&mine, transposed == Transposed::Yes ? distribute<true> : distribute<false>, place);
}

}  // namespace cuda_emu
