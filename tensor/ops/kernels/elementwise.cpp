#include "tensor/ops/kernels/random.h"
#include "tensor/ops/kernels/table.h"
#include "tensor/ops/kernels/vec.h"

namespace regather::REGATHER_ISA {
namespace {

constexpr float kRootTwoOverPi = 0.79788456080286536F, kCubic = 0.044715F;

}  // namespace

template <class T>
void add(T* y, const T* a, const T* b, Size n) {
  for_each_vector(n, [=](Size i, auto get, auto put) { put(y + i, get(a + i) + get(b + i)); });
}

// x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3): the same as x (1 + tanh u) / 2.
template <class T>
void gelu(T* y, const T* x, Size n) {
  for_each_vector(n, [=](Size i, auto get, auto put) {
    const F a = get(x + i);
    put(y + i, a * sigmoid((2 * kRootTwoOverPi) * a * (1.0F + kCubic * a * a)));
  });
}

template <class T>
void gelu_backward(T* dx, const T* x, const T* dy, Size n) {
  for_each_vector(n, [=](Size i, auto get, auto put) {
    const F a = get(x + i), s = sigmoid((2 * kRootTwoOverPi) * a * (1.0F + kCubic * a * a));
    const F slope = (2 * kRootTwoOverPi) * (1.0F + (3 * kCubic) * a * a);
    put(dx + i, get(dy + i) * (s + a * s * (1.0F - s) * slope));
  });
}

template <class T>
void swiglu(T* y, const T* gate, const T* up, Size n) {
  for_each_vector(n, [=](Size i, auto get, auto put) {
    const F g = get(gate + i);
    put(y + i, g * sigmoid(g) * get(up + i));
  });
}

template <class T>
void swiglu_backward(T* dgate, T* dup, const T* gate, const T* up, const T* dy, Size n) {
  for_each_vector(n, [=](Size i, auto get, auto put) {
    const F g = get(gate + i), s = sigmoid(g), d = get(dy + i);
    if (dgate) put(dgate + i, d * get(up + i) * s * (1.0F + g * (1.0F - s)));
    if (dup) put(dup + i, d * g * s);
  });
}

template <class T>
void dropout(T* y, const T* x, Size n, const RandomRow& row, std::uint32_t threshold, float scale) {
  constexpr Size kPiece = 256;
  std::uint32_t words[kPiece + 4 * kQuads + 4 + kLanes] = {};
  for (Size i = 0; i < n; i += kPiece) {
    const Size count = n - i < kPiece ? n - i : kPiece;
    RandomRow piece = row;
    piece.first += static_cast<std::uint64_t>(i);
    const std::uint32_t* w = random_row(words, piece, count);
    T* to = y + i;
    const T* from = x + i;
    for_each_vector(count, [=](Size j, auto get, auto put) {
      const F keep = keep_factor(w + j, threshold, scale);
      put(to + j, keep == 0.0F ? F{} : get(from + j) * keep);  // a dropped infinity is 0, not NaN
    });
  }
}

template <class T>
void fill_rows(T* y, const T* row, Size rows, Size cols) {
  for (Size r = 0; r < rows; ++r) {
    T* to = y + r * cols;
    for_each_vector(cols, [=](Size i, auto get, auto put) { put(to + i, get(row + i)); });
  }
}

// Eight rows at a time, as a tree: fewer passes over `sums`, and a smaller error than one long chain.
template <class T>
void add_column_sums(float* sums, const T* x, Size rows, Size cols, Size stride) {
  Size r = 0;
  for (; r + 8 <= rows; r += 8) {
    const T* p = x + r * stride;
    for_each_vector(cols, [=](Size i, auto get, auto put) {
      const T* q = p + i;
      const F a = (get(q) + get(q + stride)) + (get(q + 2 * stride) + get(q + 3 * stride));
      const F b = (get(q + 4 * stride) + get(q + 5 * stride)) + (get(q + 6 * stride) + get(q + 7 * stride));
      put(sums + i, get(sums + i) + (a + b));
    });
  }
  for (; r < rows; ++r) {
    const T* p = x + r * stride;
    for_each_vector(cols, [=](Size i, auto get, auto put) { put(sums + i, get(sums + i) + get(p + i)); });
  }
}

template <class T>
void rotate_heads(T* y, const T* x, const float* cosine, const float* sine, Size heads, Size half) {
  for (Size h = 0; h < heads; ++h) {
    const T* from = x + 2 * h * half;
    T* to = y + 2 * h * half;
    for_each_vector(half, [=](Size i, auto get, auto put) {
      const F a = get(from + i), b = get(from + half + i), c = get(cosine + i), s = get(sine + i);
      put(to + i, a * c - b * s);
      put(to + half + i, b * c + a * s);
    });
  }
}

template <class To, class From>
void convert(To* y, const From* x, Size n) {
  for_each_vector(n, [=](Size i, auto get, auto put) { put(y + i, get(x + i)); });
}
template void convert(Bf16*, const float*, Size);
template void convert(float*, const Bf16*, Size);

template void add(float*, const float*, const float*, Size);
template void gelu(float*, const float*, Size);
template void gelu_backward(float*, const float*, const float*, Size);
template void swiglu(float*, const float*, const float*, Size);
template void swiglu_backward(float*, float*, const float*, const float*, const float*, Size);
template void dropout(float*, const float*, Size, const RandomRow&, std::uint32_t, float);
template void fill_rows(float*, const float*, Size, Size);
template void add_column_sums(float*, const float*, Size, Size, Size);
template void rotate_heads(float*, const float*, const float*, const float*, Size, Size);

template void add(Bf16*, const Bf16*, const Bf16*, Size);
template void gelu(Bf16*, const Bf16*, Size);
template void gelu_backward(Bf16*, const Bf16*, const Bf16*, Size);
template void swiglu(Bf16*, const Bf16*, const Bf16*, Size);
template void swiglu_backward(Bf16*, Bf16*, const Bf16*, const Bf16*, const Bf16*, Size);
template void dropout(Bf16*, const Bf16*, Size, const RandomRow&, std::uint32_t, float);
template void fill_rows(Bf16*, const Bf16*, Size, Size);
template void add_column_sums(float*, const Bf16*, Size, Size, Size);
template void rotate_heads(Bf16*, const Bf16*, const float*, const float*, Size, Size);

}  // namespace regather::REGATHER_ISA
