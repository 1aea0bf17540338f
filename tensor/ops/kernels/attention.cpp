// Causal attention of one key/value head, in tiles; no T x T matrix.
// Everything that a tile reads is packed once per head into panels of kNr columns, so that every inner loop is the same
// small register-blocked product with constant strides:
//   forward   S = Q K^T, O += P V          (online softmax: running maximum and sum of a row)
//   backward  S, dP = dO V^T, dV += P^T dO, dK += dS^T Q, dQ += dS K        with P = 2^(S - lse), dS = P (dP -
//   rowsum(dO y))
// Scores are in units of log 2: log2(e) scale is folded into packed K^T, scale into packed Q (so dS^T Q is dK), and dQ
// is scaled when it is unpacked. Rows and columns are padded with zeros to whole blocks; a padded row has P = 0. The
// number of additions in an element of y or a gradient, and their order, follow from the shape alone.
#include "tensor/ops/kernels/random.h"
#include "tensor/ops/kernels/table.h"
#include "tensor/ops/kernels/vec.h"

namespace regather::REGATHER_ISA {
namespace {

constexpr int kNv = 2, kNr = kNv * kLanes;  // columns of a block
constexpr int kMr = kLanes == 16 ? 12 : 6;  // rows of a block: kMr x kNv accumulators fit the registers
constexpr Size kTile = 96;                  // rows and columns of a tile of scores
static_assert(kTile % kMr == 0 && kTile % kNr == 0);
constexpr float kLog2e = 1.44269504088896341F, kLn2 = 0.69314718055994531F;

REGATHER_INLINE Size round_up(Size n, Size to) { return (n + to - 1) / to * to; }
REGATHER_INLINE Size smaller(Size a, Size b) { return a < b ? a : b; }

struct Block {
  F c[kMr][kNv];
};
REGATHER_INLINE void load_block(Block& t, const float* c, Size stride) {
  for (int r = 0; r < kMr; ++r)
    for (int n = 0; n < kNv; ++n) t.c[r][n] = load(c + r * stride + n * kLanes);
}
REGATHER_INLINE void store_block(float* c, Size stride, const Block& t) {
  for (int r = 0; r < kMr; ++r)
    for (int n = 0; n < kNv; ++n) store(c + r * stride + n * kLanes, t.c[r][n]);
}
// t += A B over `depth`; element (r, k) of A is a[r kRow + k kDepth], row k of B begins at b + k kNr.
template <Size kRow, Size kDepth>
REGATHER_INLINE void multiply(Block& t, const float* a, const float* b, Size depth) {
  for (Size k = 0; k < depth; ++k, a += kDepth, b += kNr) {
    F bv[kNv];
#pragma GCC unroll 2
    for (int n = 0; n < kNv; ++n) bv[n] = load(b + n * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kMr; ++r) {
      const F av = splat(a[r * kRow]);
#pragma GCC unroll 2
      for (int n = 0; n < kNv; ++n) t.c[r][n] += av * bv[n];
    }
  }
}

// Panels: columns [p kNr, (p+1) kNr) of `rows` rows, each panel dense. capacity: rows of a panel, >= rows; the rest is
// zero.
template <class T>
void pack_panels(float* to, const T* from, Size stride, Size rows, Size capacity, Size cols, float factor) {
  for (Size p = 0; p * kNr < cols; ++p) {
    const Size width = smaller(kNr, cols - p * kNr);
    float* panel = to + p * kNr * capacity;
    for (Size r = 0; r < rows; ++r)
      for (int n = 0; n < kNv; ++n) {
        const T* x = from + r * stride + p * kNr + n * kLanes;
        const Size left = width - n * kLanes;
        store(panel + r * kNr + n * kLanes, (left >= kLanes ? load(x) : load_first(x, left)) * factor);
      }
    for (Size i = rows * kNr; i < capacity * kNr; i += kLanes) store(panel + i, F{});
  }
}
// Exchanges rows and columns of 2x2 blocks of W x W, all over a square of vectors; done for W = 1, 2, 4, .. it
// transposes.
template <int W>
REGATHER_INLINE void exchange_blocks(F (&x)[kLanes]) {
  I low{}, high{};
  for (int i = 0; i < kLanes; ++i) {
    low[i] = (i & W) ? kLanes + (i ^ W) : i;
    high[i] = (i & W) ? kLanes + i : i | W;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & W) continue;
    const F a = x[i], b = x[i | W];
    x[i] = __builtin_shuffle(a, b, low);
    x[i | W] = __builtin_shuffle(a, b, high);
  }
}
REGATHER_INLINE void transpose(F (&x)[kLanes]) {
  exchange_blocks<1>(x);
  exchange_blocks<2>(x);
  if constexpr (kLanes > 4) exchange_blocks<4>(x);
  if constexpr (kLanes > 8) exchange_blocks<8>(x);
}

// Panels of the transpose: panel p holds rows [p kNr, (p+1) kNr) of `from` as columns, depth `cols`.
template <class T>
void pack_transposed(float* to, const T* from, Size stride, Size rows, Size cols, float factor) {
  for (Size row = 0; row < round_up(rows, kNr); row += kLanes)
    for (Size col = 0; col < cols; col += kLanes) {
      const Size width = smaller(kLanes, cols - col);
      F x[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        const T* p = from + (row + r) * stride + col;
        x[r] = row + r >= rows ? F{} : (width == kLanes ? load(p) : load_first(p, width)) * factor;
      }
      transpose(x);
      float* panel = to + row / kNr * kNr * cols + row % kNr;
      for (int c = 0; c < kLanes; ++c)
        if (c < width) store(panel + (col + c) * kNr, x[c]);
    }
}
template <class T>
void unpack_panels(T* to, Size stride, const float* from, Size capacity, Size rows, Size cols, float factor) {
  for (Size p = 0; p * kNr < cols; ++p) {
    const Size width = smaller(kNr, cols - p * kNr);
    for (Size r = 0; r < rows; ++r)
      for (int n = 0; n < kNv; ++n) {
        const Size left = width - n * kLanes;
        const F v = load(from + (p * capacity + r) * kNr + n * kLanes) * factor;
        T* y = to + r * stride + p * kNr + n * kLanes;
        left >= kLanes ? store(y, v) : store_first(y, v, left);
      }
  }
}

// Rows [row, row + kMr) of packed A (panels of `capacity` rows) times a transposed panel: kMr x kNr scores.
REGATHER_INLINE Block scores(const float* a, Size capacity, Size row, const float* panel, Size head_size) {
  Block t{};
  for (Size p = 0; p * kNr < head_size; ++p)
    multiply<kNr, 1>(t, a + (p * capacity + row) * kNr, panel + p * kNr * kNr, smaller(kNr, head_size - p * kNr));
  return t;
}

// 0 and keep_scale for columns [first, first + kTile) of row t of head h.
void dropout_row(float* factors, const AttentionShape& s, Size head, Size t, Size first) {
  std::uint32_t words[kTile + 4 * kQuads + 4 + kLanes] = {};
  const Size element = ((s.first_head + head) * s.tokens + t) * s.tokens + first;
  const RandomRow row = {{s.key[0], s.key[1]}, s.sequence, static_cast<std::uint64_t>(element)};
  const std::uint32_t* w = random_row(words, row, kTile);
  for (Size j = 0; j < kTile; j += kLanes) store(factors + j, keep_factor(w + j, s.threshold, s.keep_scale));
}

REGATHER_INLINE F iota(Size first) {
  F v{};
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<float>(i);
  return v + static_cast<float>(first);
}

// Sizes of the scratch of one worker, in floats.
struct Extent {
  Size rows, panels, packed,
      tile;  // rows: tokens, padded; packed: [rows, head_size] in panels; tile: the same, of kTile rows
};
Extent extent_of(Size tokens, Size head_size) {
  const Size rows = round_up(tokens, kTile), panels = round_up(head_size, kNr) / kNr;
  return {rows, panels, rows * panels * kNr, kTile * panels * kNr};
}
constexpr Size kScores = kTile * kTile;

// The running softmax of one row: replaces `width` scores by 2^(s - maximum) (times the dropout factors, if any),
// zeroes what follows up to `end`, and gives the factor that older terms of this row have to be scaled by.
REGATHER_INLINE float softmax_row(float* s, Size width, Size end, float& maximum, float& total, const float* factors) {
  F top = splat(-__builtin_inff());
  Size j = 0;
  for (; j + kLanes <= width; j += kLanes) top = max(load(s + j), top);
  if (j < width) {
    const F last = iota(j) < static_cast<float>(width) ? load(s + j) : splat(-__builtin_inff());
    store(s + j, last);
    top = max(last, top);
    j += kLanes;
  }
  for (Size z = j; z < end; z += kLanes) store(s + z, F{});
  const float m = largest(top), before = maximum;
  if (m > maximum) maximum = m;
  F sum0{};
  for (Size k = 0; k < j; k += kLanes) {
    const F p = exp2_below_one(load(s + k) - maximum);
    sum0 += p;
    store(s + k, factors ? p * load(factors + k) : p);
  }
  const float rescale = maximum == before ? 1.0F : exp2_below_one(splat(before - maximum))[0];
  total = total * rescale + sum(sum0);
  return rescale;
}

struct QueryTile {
  const float* q;  // packed
  float *s, *o;    // scores [kTile, kTile]; output, in panels
  float maximum[kTile], total[kTile];
};

// One tile of keys. diagonal: it begins at the queries' own first token, so column j of row i counts only when j <= i.
void forward_tile(const AttentionShape& shape, QueryTile& t, const float* kt, const float* v, Size v_rows, Size rows,
                  Size cols, bool diagonal, Size head, Size first_row, Size first_col) {
  const Size head_size = shape.head_size;
  for (Size c = 0; c < cols; c += kNr)
    for (Size r = diagonal ? c / kMr * kMr : 0; r < rows; r += kMr)
      store_block(t.s + r * kTile + c, kTile, scores(t.q, kTile, r, kt + c * head_size, head_size));
  float factors[kTile];
  for (Size r = 0; r < rows; ++r) {
    const bool drops = shape.threshold != 0;
    if (drops) dropout_row(factors, shape, head, first_row + r, first_col);
    const Size width = diagonal ? smaller(r + 1, cols) : cols,
               end = diagonal ? smaller(r / kMr * kMr + kMr, cols) : cols;
    const float rescale = softmax_row(t.s + r * kTile, width, end, t.maximum[r], t.total[r], drops ? factors : nullptr);
    if (rescale == 1.0F) continue;
    for (Size c = 0; c < head_size; c += kNr)
      for (int n = 0; n < kNv; ++n) {
        float* o = t.o + c * kTile + r * kNr + n * kLanes;
        store(o, load(o) * rescale);
      }
  }
  for (Size c = 0; c < head_size; c += kNr)
    for (Size r = 0; r < rows; r += kMr) {
      float* o = t.o + c * kTile + r * kNr;
      Block b;
      load_block(b, o, kNr);
      multiply<kTile, 1>(b, t.s + r * kTile, v + c * v_rows, diagonal ? smaller(r + kMr, cols) : cols);
      store_block(o, kNr, b);
    }
}

struct KeyTile {
  const float *kt, *vt, *k;  // K^T log2(e) and V^T in panels of columns, K in panels
  float *p, *ds;             // [kTile, kTile]
};
struct BackwardHead {  // packed [tokens, head_size] each, and [tokens] each
  const float *q, *dy, *lse, *delta;
  float *dq, *dk, *dv;
};

// P and dS of one block.
REGATHER_INLINE void gradient_block(const AttentionShape& shape, const BackwardHead& h, const KeyTile& t, Size capacity,
                                    Size first_row, Size r, Size c, bool diagonal, const float* factors) {
  float *p = t.p + r * kTile + c, *ds = t.ds + r * kTile + c;
  const Size row = first_row + r;
  Block b = scores(h.q, capacity, row, t.kt + c * shape.head_size, shape.head_size);
  const bool masked = diagonal && r < c + kNr - 1;
  for (int i = 0; i < kMr; ++i)
    for (int n = 0; n < kNv; ++n) {
      F x = exp2_below_one(b.c[i][n] - h.lse[row + i]);
      if (masked) x = iota(c + n * kLanes) <= static_cast<float>(r + i) ? x : F{};
      store(p + i * kTile + n * kLanes, x);
    }
  b = scores(h.dy, capacity, row, t.vt + c * shape.head_size, shape.head_size);
  for (int i = 0; i < kMr; ++i)
    for (int n = 0; n < kNv; ++n) {
      const Size at = i * kTile + n * kLanes;
      const F x = load(p + at), f = factors ? load(factors + r * kTile + c + at) : splat(1.0F);
      store(ds + at, x * (b.c[i][n] * f - h.delta[row + i]));
      if (factors) store(p + at, x * f);
    }
}

void backward_tile(const AttentionShape& shape, const BackwardHead& h, const KeyTile& t, const Extent& e,
                   Size first_row, Size rows, Size first_col, Size cols, const float* factors) {
  const bool diagonal = first_row == first_col;
  for (Size c = 0; c < cols; c += kNr)
    for (Size r = diagonal ? c / kMr * kMr : 0; r < rows; r += kMr)
      gradient_block(shape, h, t, e.rows, first_row, r, c, diagonal, factors);
  // d = sum over the tile's rows of A^T B, for dV (P, dO) and dK (dS, Q).
  const auto columns = [&](float* d, const float* a, const float* b) {
    for (Size p = 0; p < e.panels; ++p)
      for (Size c = 0; c < cols; c += kMr) {
        const Size begin = diagonal ? c : 0;
        float* to = d + (p * e.rows + first_col + c) * kNr;
        Block x;
        load_block(x, to, kNr);
        multiply<1, kTile>(x, a + begin * kTile + c, b + (p * e.rows + first_row + begin) * kNr, rows - begin);
        store_block(to, kNr, x);
      }
  };
  columns(h.dv, t.p, h.dy);
  columns(h.dk, t.ds, h.q);
  for (Size p = 0; p < e.panels; ++p)
    for (Size r = 0; r < rows; r += kMr) {
      float* to = h.dq + (p * e.rows + first_row + r) * kNr;
      Block x;
      load_block(x, to, kNr);
      multiply<kTile, 1>(x, t.ds + r * kTile, t.k + p * kTile * kNr, diagonal ? smaller(r + kMr, cols) : cols);
      store_block(to, kNr, x);
    }
}

void zero(float* x, Size n) {
  for (Size i = 0; i < n; i += kLanes) store(x + i, F{});
}

// lse in units of log 2 (infinite for padding: P = 0 there) and rowsum(dO y).
template <class T>
void prepare_rows(const AttentionBackward<T>& task, Size head, const Extent& e, float* lse, float* delta) {
  const AttentionShape& s = task.shape;
  for (Size t = 0; t < s.tokens; ++t) {
    const T *y = task.y + t * s.y_stride + head * s.head_size, *dy = task.dy + t * s.y_stride + head * s.head_size;
    F d{};
    for (Size c = 0; c < s.head_size; c += kLanes) {
      const Size left = s.head_size - c;
      d += left >= kLanes ? load(y + c) * load(dy + c) : load_first(y + c, left) * load_first(dy + c, left);
    }
    delta[t] = sum(d);
    lse[t] = task.lse[head * s.tokens + t] * kLog2e;
  }
  for (Size t = s.tokens; t < e.rows; ++t) {
    delta[t] = 0;
    lse[t] = __builtin_inff();
  }
}

template <class T>
void backward_head(const AttentionBackward<T>& task, Size head, const Extent& e, const BackwardHead& h, float* tiles) {
  const AttentionShape& s = task.shape;
  float *kt = tiles, *vt = kt + e.tile, *k = vt + e.tile, *p = k + e.tile, *ds = p + kScores, *factors = ds + kScores;
  const KeyTile tile{kt, vt, k, p, ds};
  for (Size col = 0; col < s.tokens; col += kTile) {
    const Size cols = smaller(kTile, s.tokens - col);
    pack_transposed(kt, task.k + col * s.qkv_stride, s.qkv_stride, cols, s.head_size, kLog2e);
    pack_transposed(vt, task.v + col * s.qkv_stride, s.qkv_stride, cols, s.head_size, 1.0F);
    pack_panels(k, task.k + col * s.qkv_stride, s.qkv_stride, cols, kTile, s.head_size, 1.0F);
    for (Size row = col; row < s.tokens; row += kTile) {
      const Size rows = round_up(smaller(kTile, s.tokens - row), kMr);
      if (s.threshold != 0)
        for (Size r = 0; r < rows; ++r) dropout_row(factors + r * kTile, s, head, row + r, col);
      backward_tile(s, h, tile, e, row, rows, col, cols, s.threshold != 0 ? factors : nullptr);
    }
  }
}

}  // namespace

Size attention_scratch(Size tokens, Size head_size, bool backward) {
  const Extent e = extent_of(tokens, head_size);
  return backward ? 5 * e.packed + 2 * e.rows + 3 * e.tile + 3 * kScores : 2 * e.packed + 2 * e.tile + kScores;
}

template <class T>
void attention_forward(const AttentionForward<T>& task) {
  const AttentionShape& s = task.shape;
  const Extent e = extent_of(s.tokens, s.head_size);
  float *kt = task.scratch, *v = kt + e.packed, *q = v + e.packed;
  QueryTile t;
  t.q = q;
  t.o = q + e.tile;
  t.s = t.o + e.tile;
  pack_transposed(kt, task.k, s.qkv_stride, s.tokens, s.head_size, 1.0F);
  pack_panels(v, task.v, s.qkv_stride, s.tokens, e.rows, s.head_size, 1.0F);
  for (Size head = 0; head < s.group; ++head)
    for (Size row = 0; row < s.tokens; row += kTile) {
      const Size rows = smaller(kTile, s.tokens - row), padded = round_up(rows, kMr);
      pack_panels(q, task.q + row * s.qkv_stride + head * s.head_size, s.qkv_stride, rows, kTile, s.head_size,
                  s.scale * kLog2e);
      zero(t.o, e.tile);
      for (Size r = 0; r < kTile; ++r) t.maximum[r] = -__builtin_inff(), t.total[r] = 0;
      for (Size col = 0; col <= row; col += kTile)
        forward_tile(s, t, kt + col * s.head_size, v + col * kNr, e.rows, padded, smaller(kTile, s.tokens - col),
                     col == row, head, row, col);
      for (Size r = 0; r < rows; ++r) {
        unpack_panels(task.y + (row + r) * s.y_stride + head * s.head_size, s.y_stride, t.o + r * kNr, kTile, 1,
                      s.head_size, 1.0F / t.total[r]);
        task.lse[head * s.tokens + row + r] = t.maximum[r] * kLn2 + __builtin_logf(t.total[r]);
      }
    }
}

template <class T>
void attention_backward(const AttentionBackward<T>& task) {
  const AttentionShape& s = task.shape;
  const Extent e = extent_of(s.tokens, s.head_size);
  float *q = task.scratch, *dy = q + e.packed, *dq = dy + e.packed, *dk = dq + e.packed, *dv = dk + e.packed;
  float *lse = dv + e.packed, *delta = lse + e.rows, *tiles = delta + e.rows;
  zero(dk, 2 * e.packed);
  for (Size head = 0; head < s.group; ++head) {
    pack_panels(q, task.q + head * s.head_size, s.qkv_stride, s.tokens, e.rows, s.head_size, s.scale);
    pack_panels(dy, task.dy + head * s.head_size, s.y_stride, s.tokens, e.rows, s.head_size, 1.0F);
    zero(dq, e.packed);
    prepare_rows(task, head, e, lse, delta);
    backward_head(task, head, e, {q, dy, lse, delta, dq, dk, dv}, tiles);
    unpack_panels(task.dq + head * s.head_size, s.qkv_stride, dq, e.rows, s.tokens, s.head_size, s.scale);
  }
  unpack_panels(task.dk, s.qkv_stride, dk, e.rows, s.tokens, s.head_size, 1.0F);
  unpack_panels(task.dv, s.qkv_stride, dv, e.rows, s.tokens, s.head_size, 1.0F);
}

template void attention_forward(const AttentionForward<float>&);
template void attention_backward(const AttentionBackward<float>&);
template void attention_forward(const AttentionForward<Bf16>&);
template void attention_backward(const AttentionBackward<Bf16>&);

}  // namespace regather::REGATHER_ISA
