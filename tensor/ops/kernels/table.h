// What the kernel files of one instruction set give to its table (table.cpp), in that set's namespace. Each file
// defines its templates and instantiates them for both element types.
#pragma once
#include "tensor/ops/kernel_types.h"

namespace regather::REGATHER_ISA {

using Size = std::int64_t;

template <class T>
void add(T* y, const T* a, const T* b, Size n);
template <class T>
void gelu(T* y, const T* x, Size n);
template <class T>
void gelu_backward(T* dx, const T* x, const T* dy, Size n);
template <class T>
void swiglu(T* y, const T* gate, const T* up, Size n);
template <class T>
void swiglu_backward(T* dgate, T* dup, const T* gate, const T* up, const T* dy, Size n);
template <class T>
void dropout(T* y, const T* x, Size n, const RandomRow& row, std::uint32_t threshold, float scale);
template <class T>
void fill_rows(T* y, const T* row, Size rows, Size cols);
template <class T>
void add_column_sums(float* sums, const T* x, Size rows, Size cols, Size stride);
template <class T>
void layer_norm(T* y, const T* x, const T* gain, const T* bias, Size rows, Size cols, float eps);
template <class T>
void rms_norm(T* y, const T* x, const T* gain, Size rows, Size cols, float eps);
template <class T>
void layer_norm_backward(T* dx, float* dgain, float* dbias, const T* x, const T* gain, const T* dy, Size rows,
                         Size cols, float eps);
template <class T>
void rms_norm_backward(T* dx, float* dgain, const T* x, const T* gain, const T* dy, Size rows, Size cols, float eps);
template <class T>
void rotate_heads(T* y, const T* x, const float* cosine, const float* sine, Size heads, Size half);
template <class T>
void attention_forward(const AttentionForward<T>& task);
template <class T>
void attention_backward(const AttentionBackward<T>& task);

template <class To, class From>
void convert(To* y, const From* x, Size n);  // Bf16 from float, or float from Bf16
Size attention_scratch(Size tokens, Size head_size, bool backward);
float token_loss(const float* logits, Size vocab, Size target);
float token_loss_gradient(float* logits, Size vocab, Size target, float weight);
void adamw(float* p, float* m, float* v, const float* g, Size n, const AdamWFactors& f);
void sgd(float* p, float* momentum, const float* g, Size n, float gradient_scale, float decay, float lr, float mu);
double sum_of_squares(const float* x, Size n);
Size count_nonfinite(const float* x, Size n);

}  // namespace regather::REGATHER_ISA
