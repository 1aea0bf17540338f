// The table of models: a type's name, and the function that builds it. A program of one's own adds rows to
// built_in_models() and hands the table on. It holds no state.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "model/config.h"
#include "tensor/block.h"

namespace regather {

struct ModelType {
  std::string name;  // `model.type`
  std::function<Model(const ModelConfig&)> make;
};
using ModelRegistry = std::vector<ModelType>;

ModelRegistry built_in_models();

// Throws UsageError for an unknown type (the message lists the known ones), for a name that the table has twice, and
// for sizes that the model cannot have.
Model make_model(const ModelConfig& config, const ModelRegistry& registry = built_in_models());

}  // namespace regather
