#include "tensor/ops/kernels/table.h"

namespace regather::REGATHER_ISA {
namespace {

template <class T>
constexpr ElementKernels<T> kElementTable = {
    .add = add,
    .gelu = gelu,
    .gelu_backward = gelu_backward,
    .swiglu = swiglu,
    .swiglu_backward = swiglu_backward,
    .dropout = dropout,
    .fill_rows = fill_rows,
    .add_column_sums = add_column_sums,
    .layer_norm = layer_norm,
    .rms_norm = rms_norm,
    .layer_norm_backward = layer_norm_backward,
    .rms_norm_backward = rms_norm_backward,
    .rotate_heads = rotate_heads,
    .attention_forward = attention_forward,
    .attention_backward = attention_backward,
};

}  // namespace

extern const Kernels kTable;
const Kernels kTable = {
    .fp32 = kElementTable<float>,
    .bf16 = kElementTable<Bf16>,
    .round = convert,
    .widen = convert,
    .attention_scratch = attention_scratch,
    .token_loss = token_loss,
    .token_loss_gradient = token_loss_gradient,
    .adamw = adamw,
    .sgd = sgd,
    .sum_of_squares = sum_of_squares,
    .count_nonfinite = count_nonfinite,
};

}  // namespace regather::REGATHER_ISA
