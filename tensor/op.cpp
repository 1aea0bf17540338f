#include "tensor/op.h"

#include <algorithm>

namespace regather {

double Op::bytes(Direction direction, std::span<const ValueType> in, std::span<const Shape> params,
                 const Needs& needs) const {
  const bool backward = direction == Direction::Backward;
  if (backward && passes_gradient()) return 0;
  const bool forward = !backward || fused_with_backward();
  const Saved read = backward ? saved(needs) : Saved{};
  const auto size = [](const ValueType& v) {
    return static_cast<double>(v.shape.numel() * static_cast<std::int64_t>(size_of(v.dtype)));
  };
  double bytes = 0;
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (forward || has(read.inputs, i)) bytes += size(in[i]);
    if (backward && has(needs.inputs, i)) bytes += size(in[i]);  // its gradient
  }
  const std::vector<ValueType> out = outputs(in, params);
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (forward || has(read.outputs, i)) bytes += size(out[i]);
    if (backward) bytes += size(out[i]);  // its gradient
  }
  // Parameters are of the type that it computes on: that of its first input, if that is not an index.
  const DType elements = !in.empty() && in[0].dtype != DType::I32 ? in[0].dtype : DType::F32;
  for (std::size_t k = 0; k < params.size(); ++k) {
    if (forward || needs.inputs != 0) bytes += size({params[k], elements});
    if (backward && has(needs.params, k)) bytes += 2 * size({params[k], DType::F32});  // its gradient is added to
  }
  return bytes;
}

Work Op::work(Direction direction, std::span<const ValueType> in, std::span<const Shape> params,
              const Needs& needs) const {
  const bool forward = direction == Direction::Forward;
  return {forward ? flops(in, params) : backward_flops(in, params, needs), bytes(direction, in, params, needs)};
}

}  // namespace regather
