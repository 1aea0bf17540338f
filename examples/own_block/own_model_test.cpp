// Is the operation what it says it is, and the block that uses it? Ends with 1 and what disagrees, if something does.
#include <cstdio>

#include "own_model.h"
#include "tensor/check_gradients.h"

int main() {
  using namespace regather;
  const GradientCheck of_operation =
      check_gradients([] { return std::make_unique<own::SquaredRelu>(); }, {{Shape{2, 3, 8}}}, {});
  const Model model = own::make_own({.layers = 1, .hidden = 16, .heads = 2, .vocab = 8, .dropout = 0.1F});
  const Part& block = model.blocks[0];
  const auto& parameters = model.units[static_cast<std::size_t>(block.units[0])].params;
  const GradientCheck of_block = check_gradients(*block.block, {{Shape{2, 5, 16}}}, parameters);
  for (const auto& [name, check] : {std::pair{"squared_relu", &of_operation}, {"the block", &of_block}})
    std::printf("%s: %s (%d operations, errors up to %.1e)\n", name,
                check->ok() ? "right" : check->disagreement.c_str(), check->operations, check->largest_error);
  return of_operation.ok() && of_block.ok() ? 0 : 1;
}
