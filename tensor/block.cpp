#include "tensor/block.h"

#include "tensor/trace.h"

namespace regather {
namespace {

std::vector<ValueType> types_of(std::span<const Tensor> in) {
  std::vector<ValueType> types;
  for (const Tensor& t : in) types.push_back({t.shape(), t.dtype()});
  return types;
}
std::vector<Shape> shapes_of(const ParamView& params, std::span<const int> ids) {
  std::vector<Shape> shapes;
  for (int id : ids) shapes.push_back(params.info(id).shape);
  return shapes;
}

}  // namespace

Activations allocate_outputs(const Op& op, Device& device, std::span<const Tensor> in, const ParamView& params,
                             std::span<const int> param_ids) {
  Activations out;
  for (const ValueType& type : op.outputs(types_of(in), shapes_of(params, param_ids)))
    out.emplace_back(device.memory, type.shape, Tag::Activations, type.dtype);
  return out;
}

double flops_of(const Op& op, std::span<const Tensor> in, const ParamView& params, std::span<const int> param_ids) {
  return op.flops(types_of(in), shapes_of(params, param_ids));
}

Activations execute(const Op& op, Device& device, std::span<const Tensor> in, const ParamView& params,
                    std::span<const int> param_ids, const RngKey& key) {
  const Allocator::Asking asking(device.memory, op.name());
  Activations out = allocate_outputs(op, device, in, params, param_ids);
  const Buffer workspace(
      device.memory, op.workspace(device.kind(), Op::Direction::Forward, types_of(in), shapes_of(params, param_ids)),
      Tag::Workspace);
  if (!device.meta()) op.forward({device, in, out, &params, param_ids, key, workspace.data<float>()});
  device.make_progress();
  return out;
}

Activations Run::apply(std::unique_ptr<const Op> op, Activations in, std::vector<int> param_ids) {
  if (tape && observer) {
    const Op& seen = *op;  // the tape keeps it
    const Activations inputs = in;
    const std::vector<int> ids = param_ids;
    Activations out = tape->record(std::move(op), std::move(in), params, std::move(param_ids));
    observer->recorded(seen, inputs, out, ids);
    return out;
  }
  if (tape) return tape->record(std::move(op), std::move(in), params, std::move(param_ids));
  const RngKey here{key.seed, key.step, key.sequence, key.block, key.op++};
  return with_context([&] { return std::string(op->name()); },
                      [&] { return execute(*op, device, in, params, param_ids, here); });
}

std::int64_t Model::num_parameters() const {
  std::int64_t n = 0;
  for (const UnitSpec& unit : units)
    for (const ParamInfo& p : unit.params) n += p.shape.numel();
  return n;
}

}  // namespace regather
