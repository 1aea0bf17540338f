// What models are put together with: descriptions of parameters, checks of sizes that all models share, and a builder
// that collects units and parts, freezes what the configuration names, and gives linear layers their adapters. It
// computes nothing.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/lora.h"
#include "tensor/block.h"

namespace regather {

ParamInfo weight(std::string name, std::int64_t out, std::int64_t in, Init init);  // [out, in], decays
ParamInfo bias(std::string name, std::int64_t n);                                  // [n], zeros, does not decay
ParamInfo norm_gain(std::string name, std::int64_t n);                             // [n], ones, does not decay

// Of matrices whose output is added to the residual stream: two a layer, so that its variance does not grow with depth.
Init residual_init(const ModelConfig& config);

// Refuses sizes that no model can have; kv_heads and rope_theta are the model's own business.
void check_sizes(const ModelConfig& config);

class ModelBuilder {
 public:
  explicit ModelBuilder(const ModelConfig& config);
  // Its index. layers: those of its linear layers that may have an adapter.
  int unit(UnitSpec spec, const std::vector<LinearLayer>& layers = {});
  void embedding(std::unique_ptr<const Block> block, std::vector<int> units);
  void block(std::unique_ptr<const Block> block, std::vector<int> units);
  void head(std::unique_ptr<const Block> block, std::vector<int> units);
  // Files of the original call a parameter by prefix + its name, and store a block's matrices transposed or not.
  enum class Matrices { AsHere, Transposed };
  void original(std::string prefix, Matrices matrices);
  Model finish() &&;

 private:
  void freeze();

  std::vector<std::string> frozen_;
  LoraTargets lora_;
  Model model_;
};

}  // namespace regather
