// What the kernel files of one instruction set give to its table (table.cpp), in that set's namespace.
#pragma once
#include "tensor/ops/kernel_types.h"

namespace regather::REGATHER_ISA {

using Size = std::int64_t;

void add(float* y, const float* a, const float* b, Size n);
void gelu(float* y, const float* x, Size n);
void gelu_backward(float* dx, const float* x, const float* dy, Size n);
void swiglu(float* y, const float* gate, const float* up, Size n);
void swiglu_backward(float* dgate, float* dup, const float* gate, const float* up, const float* dy, Size n);
void dropout(float* y, const float* x, Size n, const RandomRow& row, std::uint32_t threshold, float scale);
void fill_rows(float* y, const float* row, Size rows, Size cols);
void add_column_sums(float* sums, const float* x, Size rows, Size cols, Size stride);
void layer_norm(float* y, const float* x, const float* gain, const float* bias, Size rows, Size cols, float eps);
void rms_norm(float* y, const float* x, const float* gain, Size rows, Size cols, float eps);
void layer_norm_backward(float* dx, float* dgain, float* dbias, const float* x, const float* gain, const float* dy,
                         Size rows, Size cols, float eps);
void rms_norm_backward(float* dx, float* dgain, const float* x, const float* gain, const float* dy, Size rows,
                       Size cols, float eps);
void rotate_heads(float* y, const float* x, const float* cosine, const float* sine, Size heads, Size half);
Size attention_scratch(Size tokens, Size head_size, bool backward);
void attention_forward(const AttentionForward& task);
void attention_backward(const AttentionBackward& task);
float token_loss(const float* logits, Size vocab, Size target);
float token_loss_gradient(float* logits, Size vocab, Size target, float weight);
void adamw(float* p, float* m, float* v, const float* g, Size n, const AdamWFactors& f);
void sgd(float* p, float* momentum, const float* g, Size n, float gradient_scale, float decay, float lr, float mu);
double sum_of_squares(const float* x, Size n);
Size count_nonfinite(const float* x, Size n);

}  // namespace regather::REGATHER_ISA
