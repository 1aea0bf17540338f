// Parameters as operations see them: a table of descriptions, a view that waits for the gather at the first use, and
// buffers for gradients. Model code declares ParamInfo; dist provides the storage behind ParamView and Gradients.
// Parameters are never stored on a tape.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tensor/device.h"
#include "tensor/tensor.h"

namespace regather {

// Start values are a function of (seed, parameter name, element index) alone: the same on any number of ranks.
struct Init {
  enum class Kind { Zeros, Ones, Normal, Uniform } kind = Kind::Zeros;
  float std = 0.0F;    // Normal
  float bound = 0.0F;  // Uniform: in [-bound, bound)
};
inline Init zeros() { return {}; }
inline Init ones() { return {Init::Kind::Ones, 0.0F}; }
inline Init normal(float std) { return {Init::Kind::Normal, std}; }
inline Init uniform(float bound) { return {Init::Kind::Uniform, 0.0F, bound}; }

// What is added to rows [first, first + rows) of a weight [O, C] (Hu et al., "LoRA", 2021): scale * up down, with down
// [rank, C] and up [rows, rank] parameters of the weight's unit, so many places after it in the unit's table.
struct Adapter {
  int down = 0, up = 0;
  std::int64_t first = 0, rows = 0;
  float scale = 1.0F;
};

struct ParamInfo {
  std::string name;  // full name, unique in the model: "h.3.attn.c_attn.weight"
  Shape shape;
  Init init{};
  bool decay = true;                // weight decay applies (not to biases and norm gains)
  bool trainable = true;            // frozen parameters have no gradient, reduction or optimizer state
  bool optional = false;            // may stay without a gradient in a step
  std::vector<Adapter> adapters{};  // of a weight: linear() adds them
};
// Fills out[0 .. n) with elements [first, first + n) of the parameter's start value.
void initialize(const ParamInfo& info, std::uint64_t seed, std::int64_t first, std::int64_t n, float* out);

// The full values of one unit's parameters. wait() blocks (or orders the stream) until they are there.
class ParamSource {
 public:
  virtual ~ParamSource() = default;
  virtual const std::vector<ParamInfo>& table() const = 0;
  virtual const void* data(int i) = 0;  // waits; null in a meta run
  virtual DType dtype() const = 0;
};

// The parameters of one block: those of its units, one after the other. Shapes are known at once; data() waits.
class ParamView {
 public:
  ParamView() = default;
  explicit ParamView(ParamSource& source) { append(source); }
  void append(ParamSource& source) {
    for (int i = 0; i < static_cast<int>(source.table().size()); ++i) refs_.push_back({&source, i});
  }
  std::size_t size() const { return refs_.size(); }
  const ParamInfo& info(int i) const {
    const Ref& r = refs_.at(static_cast<std::size_t>(i));
    return r.source->table()[static_cast<std::size_t>(r.index)];
  }
  const void* data(int i) const {
    const Ref& r = refs_.at(static_cast<std::size_t>(i));
    return r.source->data(r.index);
  }
  DType dtype(int i) const { return refs_.at(static_cast<std::size_t>(i)).source->dtype(); }

 private:
  struct Ref {
    ParamSource* source;
    int index;
  };
  std::vector<Ref> refs_;
};

// One unit's parameter gradients in one flat fp32 buffer, zero at first; operations add. Which ones were asked for is
// kept: a trainable parameter that no backward wrote is an error that names it (unless optional).
class UnitGradients {
 public:
  // offsets[i]: where parameter i begins, in elements; -1: frozen, no gradient. elements: of the whole buffer, padding
  // included.
  UnitGradients(Device& device, std::vector<std::int64_t> offsets, std::int64_t elements, Tag tag);
  float* data(int i);          // null if frozen or in a meta run; marks the parameter as written
  void clear(Device& device);  // zero again, nothing written
  bool written(int i) const { return written_[static_cast<std::size_t>(i)]; }
  bool trainable(int i) const { return offsets_[static_cast<std::size_t>(i)] >= 0; }
  float* flat() const { return buffer_.data<float>(); }
  std::int64_t elements() const { return elements_; }

 private:
  std::vector<std::int64_t> offsets_;
  std::vector<bool> written_;
  std::int64_t elements_;
  Buffer buffer_;
};

// The gradients of one block's parameters, in the order of its ParamView.
class Gradients {
 public:
  Gradients() = default;
  void append(UnitGradients& unit, int parameters) {
    for (int i = 0; i < parameters; ++i) refs_.push_back({&unit, i});
  }
  float* data(int i) const {
    const Ref& r = refs_.at(static_cast<std::size_t>(i));
    return r.unit->data(r.index);
  }

 private:
  struct Ref {
    UnitGradients* unit;
    int index;
  };
  std::vector<Ref> refs_;
};

}  // namespace regather
