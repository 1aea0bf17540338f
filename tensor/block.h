// What model code is written against: a Block computes outputs from inputs and parameters, in a Run. It knows no rank,
// no shard and no checkpoint policy. A Model is blocks plus the units their parameters live in. Rules for a block's
// forward: one operation per statement (`h = op(h)`), marks right after the operation; a tensor made outside the run is
// a constant.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/tape.h"

namespace regather {

// Sees the operations of a recorded forward, for who checks them: the operation and the run's own values.
class OpObserver {
 public:
  virtual ~OpObserver() = default;
  virtual void recorded(const Op& op, const Activations& in, const Activations& out,
                        std::span<const int> param_ids) = 0;
};

// `y = run.apply(...)` executes now and, with a tape, records. No tape: evaluation.
struct Run {
  Device& device;
  const ParamView& params;
  Tape* tape = nullptr;
  RngKey key{};
  OpObserver* observer = nullptr;
  Activations apply(std::unique_ptr<const Op> op, Activations in, std::vector<int> param_ids = {});
  Tensor mark(std::string_view name, Tensor y) const { return tape ? tape->mark(name, std::move(y)) : y; }
};
// One operation, as Run and Tape execute it: its outputs (undefined contents), its flops, and the whole of a forward.
Activations allocate_outputs(const Op& op, Device& device, std::span<const Tensor> in, const ParamView& params,
                             std::span<const int> param_ids);
double flops_of(const Op& op, std::span<const Tensor> in, const ParamView& params, std::span<const int> param_ids);
Activations execute(const Op& op, Device& device, std::span<const Tensor> in, const ParamView& params,
                    std::span<const int> param_ids, const RngKey& key);

class Block {
 public:
  virtual ~Block() = default;
  virtual Activations forward(Run& run, const Activations& in) const = 0;
  virtual bool differentiable(std::size_t input) const { return input == 0; }
};

// Parameters that are sharded and gathered together. name: of this unit ("block 3", "wte").
struct UnitSpec {
  std::string name;
  std::vector<ParamInfo> params;
};

// A unit's parameters as descriptions, without values: all that a run without storage reads. The unit outlives it.
class DescribedUnit final : public ParamSource {
 public:
  DescribedUnit(const UnitSpec& unit, DType dtype) : unit_(unit), dtype_(dtype) {}
  const std::vector<ParamInfo>& table() const override { return unit_.params; }
  const void* data(int) override { return nullptr; }
  DType dtype() const override { return dtype_; }

 private:
  const UnitSpec& unit_;
  DType dtype_;
};

// A block and the units that hold its parameters: parameter k of the block is the k-th of those units' tables, one
// after the other. A unit may serve several parts (a tied embedding table).
struct Part {
  std::unique_ptr<const Block> block;
  std::vector<int> units;
};

// embedding: (tokens [B, T] int32) -> activations. blocks: activations -> activations, one unit each.
// head: (activations..., targets [B, T] int32) -> (token losses [B, T]); a target of -1 counts nothing.
struct Model {
  std::vector<UnitSpec> units;
  Part embedding;
  std::vector<Part> blocks;
  Part head;
  std::int64_t vocab = 0, max_sequence = 0;
  // Files of the model's original call a parameter by this and its name, and may store a block's matrices transposed.
  std::string prefix_in_files{};
  bool transposed_in_files = false;

  std::int64_t num_parameters() const;
};

}  // namespace regather
