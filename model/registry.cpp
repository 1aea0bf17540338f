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
  for (const ModelType& type : registry) {
    if (type.name == config.type) return type.make(config);
    known += (known.empty() ? "" : ", ") + type.name;
  }
  throw UsageError(fmt::format("model.type: '{}' is unknown; known: {}", config.type, known));
}

}  // namespace regather
