// Is an operation, or a block of them, what it says it is? check_gradients() runs it with random numbers and reports
// the first operation, in the order of recording, that
//   - gives other bits when it is run again, or leaves an output or a gradient unwritten;
//   - reads in backward what its saved() does not declare, or overwrites a parameter's gradient instead of adding to
//   it;
//   - has gradients that are not those of its forward (finite differences), or that depend on which others are wanted;
//   - changes its inputs;
// and, if each operation alone is right, what the whole block does otherwise when it is run twice, when everything is
// recomputed instead of kept, and against finite differences. Made for tests of small shapes: it runs every forward a
// few hundred times. It needs a CPU, no rank and no parameters' storage. It cannot know what a forward should compute.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensor/block.h"

namespace regather {

struct CheckedInput {
  Shape shape;
  DType dtype = DType::F32;
  int low = 0, high = 2;        // int32: drawn from [low, high)
  std::vector<float> values{};  // fp32; empty: drawn from a normal distribution
  bool differentiable = true;   // fp32, of an operation; a block says so itself
};

struct GradientCheckOptions {
  double tolerance = 2e-3;  // of a gradient's element, in terms of the largest of its tensor
  int coordinates = 24;     // elements of a tensor that are differentiated alone, besides directions through all
  std::uint64_t seed = 1;
};

struct GradientCheck {
  std::string disagreement{};  // empty: none. "operation 3, gelu (mlp.act): gradient of input 0, element 7: ..."
  int operations = 0;          // that were looked at
  double largest_error =
      0;  // of a gradient's element against finite differences, in terms of the largest of its tensor
  bool ok() const { return disagreement.empty(); }
};

// params: descriptions in the block's order. Their values are drawn here; those that are not trainable get no gradient.
GradientCheck check_gradients(const Block& block, const std::vector<CheckedInput>& inputs,
                              const std::vector<ParamInfo>& params, const GradientCheckOptions& options = {});
// One operation, made anew for every run, through its first output; its parameters are all of params.
using MakeOp = std::function<std::unique_ptr<const Op>()>;
GradientCheck check_gradients(const MakeOp& make, const std::vector<CheckedInput>& inputs,
                              const std::vector<ParamInfo>& params, const GradientCheckOptions& options = {});

}  // namespace regather
