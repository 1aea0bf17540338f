// The operation interface. An operation is an immutable value (attributes only) that can be executed again at any time:
// its outputs are a function of inputs, parameters and random key, and of nothing else. It allocates nothing (the
// caller hands it outputs, gradients and workspace), holds no tensor and no parameter, and writes only what it was
// handed.
#pragma once
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "tensor/device.h"
#include "tensor/params.h"
#include "tensor/philox.h"
#include "tensor/tensor.h"
#include "tensor/work.h"

namespace regather {

using Set = std::uint32_t;  // bit i: the i-th input, output or parameter of an operation
inline constexpr Set kAll = ~Set{0};
constexpr bool has(Set set, std::size_t i) { return ((set >> i) & 1U) != 0; }

struct Needs {
  Set inputs = 0, params = 0;  // which inputs and parameters want a gradient (frozen ones do not)
};
struct Saved {
  Set inputs = 0, outputs = 0;  // which values backward reads; what is not declared arrives undefined
};

// What an operation declares of one input: enough to size outputs and workspace.
struct ValueType {
  Shape shape;
  DType dtype = DType::F32;
};

struct Call {
  Device& device;
  std::span<const Tensor> in;
  std::span<Tensor> out;  // in backward: only what saved() declared is defined, and read-only
  const ParamView* params;
  std::span<const int> param_ids;
  RngKey key;
  float* workspace;  // as many bytes as workspace() asked for; null if none
  // k-th parameter of this operation, whose elements are those of its inputs; the first one waits for the gather.
  template <class T = float>
  const T* param(std::size_t k) const {
    const DType type = params->dtype(param_ids[k]);
    check(type == Element<T>::dtype, "parameter {} is {}, the operation computes on {}",
          params->info(param_ids[k]).name, name_of(type), name_of(Element<T>::dtype));
    return static_cast<const T*>(params->data(param_ids[k]));
  }
  const Shape& param_shape(std::size_t k) const { return params->info(param_ids[k]).shape; }
  std::size_t num_params() const { return param_ids.size(); }
};
struct BackwardCall : Call {
  std::span<const Tensor> dout;  // undefined where no gradient arrived
  std::span<Tensor> din;         // undefined where none is wanted; uninitialised: write, do not add
  const Gradients* grads;
  float* dparam(std::size_t k) const { return grads->data(param_ids[k]); }  // null if frozen; add to it
};

class Op {
 public:
  virtual ~Op() = default;
  virtual std::string_view name() const = 0;
  // Checks the inputs (with both sides of a mismatch in the message) and gives the outputs' types. params: shapes of
  // its own.
  virtual std::vector<ValueType> outputs(std::span<const ValueType> in, std::span<const Shape> params) const = 0;
  virtual Saved saved(const Needs& needs) const = 0;
  virtual void forward(const Call& call) const = 0;
  virtual void backward(const BackwardCall& call) const = 0;

  enum class Direction { Forward, Backward };
  // Bytes of scratch, for what computes it on a device of that kind.
  virtual std::int64_t workspace(DeviceKind, Direction, std::span<const ValueType>, std::span<const Shape>) const {
    return 0;
  }
  // Floating point operations of one forward.
  virtual double flops(std::span<const ValueType>, std::span<const Shape>) const { return 0; }
  // Of one backward that gives those gradients; of a fused loss together with its forward. 0: what it moves limits it.
  virtual double backward_flops(std::span<const ValueType>, std::span<const Shape>, const Needs&) const { return 0; }
  // Bytes that have to move: what the declarations say it reads or writes, each once. For an operation that touches
  // only part of a parameter, its own.
  virtual double bytes(Direction, std::span<const ValueType> in, std::span<const Shape> params, const Needs&) const;
  Work work(Direction, std::span<const ValueType> in, std::span<const Shape> params, const Needs&) const;
  // Its forward is limited by what it moves, and takes little of a step (a norm, an activation function). Of such an
  // operation SavePlan::cheap may drop the outputs, if it saves none of them and all its inputs are held anyway (it
  // saves them, or they are the block's): then nothing is held for the rerun alone.
  virtual bool cheap() const { return false; }
  // Every gradient of an input is dout[0] itself (a residual): nothing is computed or copied.
  virtual bool passes_gradient() const { return false; }
  // A loss: recorded, but computed together with its gradient in backward(), once; forward() is for evaluation. Its
  // outputs must be declared saved; backward() fills them. Such values must not be read by later operations.
  virtual bool fused_with_backward() const { return false; }
};

}  // namespace regather
