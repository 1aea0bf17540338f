#include "model/registry.h"

#include "model/gpt2.h"
#include "model/llama.h"

namespace regather {

ModelRegistry built_in_models() {
  return {
      {"gpt2", make_gpt2},
      {"llama", make_llama},
  };
}

Model make_model(const ModelConfig& config, const ModelRegistry& registry) {
  std::string known;
  const ModelType* found = nullptr;
  for (const ModelType& type : registry) {
    known += (known.empty() ? "" : ", ") + type.name;
    if (type.name != config.type) continue;
    if (found != nullptr) throw UsageError(fmt::format("model.type: the program has two models '{}'", type.name));
    found = &type;
  }
  if (found == nullptr) throw UsageError(fmt::format("model.type: '{}' is unknown; known: {}", config.type, known));
  return found->make(config);
}

}  // namespace regather
