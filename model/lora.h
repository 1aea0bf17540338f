// Low-rank adapters of a model's linear layers (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021):
// a linear layer of weight w computes x (w + alpha / rank B A)^T + b, w and b stay as they are, A and B are trained. A
// starts random, B at zero, so that the first step begins with the model as it was. What a model contributes is the
// table of its linear layers; linear() adds what the table's weights are described with.
#pragma once
#include <string>
#include <vector>

#include "model/config.h"
#include "tensor/block.h"

namespace regather {

// A linear layer of a block, or rows of one that computes several of them at once.
struct LinearLayer {
  std::string name;             // what model.lora.targets calls it: "attn.q"
  std::string module;           // what the adapter's parameters are called after: "model.layers.3.self_attn.q_proj"
  std::size_t weight = 0;       // in the unit's table
  std::int64_t first = 0;       // rows of the weight
  std::int64_t rows = 0;        // 0: all
  std::string several_as = {};  // a name for these rows and others of the same weight: "attn.qkv"
};

// Collects what targets match while a model is built.
class LoraTargets {
 public:
  explicit LoraTargets(const LoraOptions& options);
  // Appends the adapters of those layers that a target matches to the unit.
  void add(UnitSpec& unit, const std::vector<LinearLayer>& layers);
  // Freezes all but the adapters. Throws UsageError if a target matched nothing, with the layers that there are.
  void finish(Model& model) const;

 private:
  bool wanted(const LinearLayer& layer);

  LoraOptions options_;
  std::vector<bool> matched_;                     // by target
  std::vector<std::string> layers_, many_names_;  // that the model has
};

// Is this parameter part of an adapter?
bool is_adapter(const ParamInfo& param);

}  // namespace regather
