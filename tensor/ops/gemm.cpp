// bf16 products are fp32 products of pieces that are widened as they are needed, and so are their sums: exact products,
// fp32 accumulation. On processors without bf16 instructions that is the fast way (oneDNN's bf16 product is its
// reference loop there); widening costs 1 / kPiece of the arithmetic.
#include "tensor/ops/gemm.h"

#include <dnnl.h>
#include <omp.h>

#include <algorithm>
#include <cstring>

#include "tensor/error.h"
#include "tensor/ops/kernels.h"
#include "tensor/ops/parallel.h"

namespace regather {
namespace {

constexpr std::int64_t kPiece = 1024, kRowGrain = 64;

enum class Layout : char { Plain = 'N', Transposed = 'T' };

struct Sizes {
  std::int64_t m, n, k;
};

void multiply(Layout layout_a, Layout layout_b, const Sizes& s, const float* a, std::int64_t lead_a, const float* b,
              std::int64_t lead_b, float* c, std::int64_t lead_c, Into into) {
  const dnnl_status_t status = dnnl_sgemm(static_cast<char>(layout_a), static_cast<char>(layout_b), s.m, s.n, s.k, 1.0F,
                                          a, lead_a, b, lead_b, into == Into::Add ? 1.0F : 0.0F, c, lead_c);
  check(status == dnnl_success, "matrix product [{}, {}] x [{}, {}]: oneDNN says status {}", s.m, s.k, s.k, s.n,
        static_cast<int>(status));
}

// Pieces of about one size, none larger than kPiece.
std::int64_t piece_of(std::int64_t n) {
  const std::int64_t pieces = std::max<std::int64_t>(1, (n + kPiece - 1) / kPiece);
  return (n + pieces - 1) / pieces;
}
Sizes pieces_of(const Sizes& s) { return {piece_of(s.m), piece_of(s.n), piece_of(s.k)}; }

struct Piece {
  const float* data;
  std::int64_t lead;
};
// Rows [row, row + rows) and columns [col, col + cols): where they are if they are fp32, widened into `room` if not.
Piece widened(ConstElements x, std::int64_t lead, std::int64_t row, std::int64_t rows, std::int64_t col,
              std::int64_t cols, float* room) {
  if (x.dtype == DType::F32) return {static_cast<const float*>(x.data) + row * lead + col, lead};
  const Bf16* from = static_cast<const Bf16*>(x.data) + row * lead + col;
  parallel_blocks(rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) kernels().widen(room + r * cols, from + r * lead, cols);
  });
  return {room, cols};
}
void round_piece(Bf16* to, std::int64_t lead, const float* from, std::int64_t rows, std::int64_t cols) {
  parallel_blocks(rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) kernels().round(to + r * lead, from + r * cols, cols);
  });
}

struct Leads {
  std::int64_t a, b, c;
};

void multiply_pieces(Layout layout_a, Layout layout_b, const Sizes& s, ConstElements a, ConstElements b, Elements c,
                     const Leads& lead, Into into, float* scratch) {
  const Sizes most = pieces_of(s);
  float *room_a = scratch, *room_b = room_a + most.m * most.k, *room_c = room_b + most.k * most.n;
  for (std::int64_t i = 0; i < s.m; i += most.m)
    for (std::int64_t j = 0; j < s.n; j += most.n) {
      Sizes piece = {std::min(most.m, s.m - i), std::min(most.n, s.n - j), 0};
      const bool rounds = c.dtype == DType::BF16;
      Bf16* rounded = rounds ? static_cast<Bf16*>(c.data) + i * lead.c + j : nullptr;
      float* sums = rounds ? room_c : static_cast<float*>(c.data) + i * lead.c + j;
      const std::int64_t lead_sums = rounds ? piece.n : lead.c;
      if (rounds && into == Into::Add) widened(static_cast<const Bf16*>(rounded), lead.c, 0, piece.m, 0, piece.n, sums);
      for (std::int64_t k = 0; k < s.k; k += most.k) {
        piece.k = std::min(most.k, s.k - k);
        const Piece pa = layout_a == Layout::Plain ? widened(a, lead.a, i, piece.m, k, piece.k, room_a)
                                                   : widened(a, lead.a, k, piece.k, i, piece.m, room_a);
        const Piece pb = layout_b == Layout::Plain ? widened(b, lead.b, k, piece.k, j, piece.n, room_b)
                                                   : widened(b, lead.b, j, piece.n, k, piece.k, room_b);
        multiply(layout_a, layout_b, piece, pa.data, pa.lead, pb.data, pb.lead, sums, lead_sums,
                 k == 0 ? into : Into::Add);
      }
      if (rounds) round_piece(rounded, lead.c, sums, piece.m, piece.n);
    }
}

void gemm(Layout layout_a, Layout layout_b, const Sizes& s, ConstElements a, ConstElements b, Elements c, Into into,
          RowStrides strides, float* scratch) {
  if (s.m == 0 || s.n == 0) return;
  const Leads lead = {strides.a > 0               ? strides.a
                      : layout_a == Layout::Plain ? s.k
                                                  : s.m,
                      layout_b == Layout::Plain ? s.n : s.k, strides.c > 0 ? strides.c : s.n};
  if (s.k == 0) {
    const auto element = static_cast<std::int64_t>(size_of(c.dtype));
    for (std::int64_t row = 0; into == Into::Write && row < s.m; ++row)
      std::memset(static_cast<char*>(c.data) + row * lead.c * element, 0, static_cast<std::size_t>(s.n * element));
    return;
  }
#ifdef __SANITIZE_THREAD__
  omp_set_num_threads(1);  // ThreadSanitizer cannot see OpenMP's synchronisation
#endif
  if (a.dtype == DType::F32 && b.dtype == DType::F32 && c.dtype == DType::F32)
    return multiply(layout_a, layout_b, s, static_cast<const float*>(a.data), lead.a, static_cast<const float*>(b.data),
                    lead.b, static_cast<float*>(c.data), lead.c, into);
  check(scratch != nullptr, "a product of bf16 matrices needs scratch");
  multiply_pieces(layout_a, layout_b, s, a, b, c, lead, into, scratch);
}

}  // namespace

std::int64_t gemm_scratch(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k) {
  if (dtype == DType::F32) return 0;
  const Sizes most = pieces_of({m, n, k});
  return (most.m * most.k + most.k * most.n + most.m * most.n) * static_cast<std::int64_t>(sizeof(float));
}

void gemm_nt(std::int64_t m, std::int64_t n, std::int64_t k, ConstElements a, ConstElements b, Elements c, Into into,
             RowStrides strides, float* scratch) {
  gemm(Layout::Plain, Layout::Transposed, {m, n, k}, a, b, c, into, strides, scratch);
}
void gemm_nn(std::int64_t m, std::int64_t n, std::int64_t k, ConstElements a, ConstElements b, Elements c, Into into,
             RowStrides strides, float* scratch) {
  gemm(Layout::Plain, Layout::Plain, {m, n, k}, a, b, c, into, strides, scratch);
}
void gemm_tn(std::int64_t m, std::int64_t n, std::int64_t k, ConstElements a, ConstElements b, Elements c, Into into,
             RowStrides strides, float* scratch) {
  gemm(Layout::Transposed, Layout::Plain, {m, n, k}, a, b, c, into, strides, scratch);
}

}  // namespace regather
