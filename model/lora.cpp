#include "model/lora.h"

#include <fnmatch.h>

#include <algorithm>
#include <cmath>

namespace regather {
namespace {

constexpr std::string_view kDown = ".lora_A.weight", kUp = ".lora_B.weight";

void add_once(std::vector<std::string>& names, const std::string& name) {
  if (!name.empty() && std::ranges::find(names, name) == names.end()) names.push_back(name);
}

}  // namespace

bool is_adapter(const ParamInfo& param) { return param.name.ends_with(kDown) || param.name.ends_with(kUp); }

LoraTargets::LoraTargets(const LoraOptions& options) : options_(options), matched_(options.targets.size(), false) {
  if (options.rank == 0) return;
  if (options.rank < 0) throw UsageError(fmt::format("model.lora.rank: must be at least 0, but is {}", options.rank));
  if (!(options.alpha > 0 && std::isfinite(options.alpha)))
    throw UsageError(fmt::format("model.lora.alpha: must be above 0 and finite, but is {}", options.alpha));
}

bool LoraTargets::wanted(const LinearLayer& layer) {
  bool any = false;
  for (std::size_t t = 0; t < options_.targets.size(); ++t)
    for (const std::string& name : {layer.name, layer.several_as}) {
      if (name.empty() || fnmatch(options_.targets[t].c_str(), name.c_str(), FNM_NOESCAPE) != 0) continue;
      matched_[t] = true;
      any = true;
    }
  return any;
}

void LoraTargets::add(UnitSpec& unit, const std::vector<LinearLayer>& layers) {
  if (options_.rank == 0) return;
  for (const LinearLayer& layer : layers) {
    add_once(layers_, layer.name);
    add_once(many_names_, layer.several_as);
    if (!wanted(layer)) continue;
    const std::int64_t out = unit.params.at(layer.weight).shape.dim(0), in = unit.params[layer.weight].shape.dim(1);
    const std::int64_t rows = layer.rows > 0 ? layer.rows : out;
    const auto down = static_cast<int>(unit.params.size() - layer.weight);
    unit.params[layer.weight].adapters.push_back(
        {.down = down,
         .up = down + 1,
         .first = layer.first,
         .rows = rows,
         .scale = static_cast<float>(options_.alpha / static_cast<double>(options_.rank))});
    // PEFT's start: Kaiming uniform with a = sqrt(5), which is 1 / sqrt(inputs).
    const Init random = uniform(static_cast<float>(1.0 / std::sqrt(static_cast<double>(in))));
    unit.params.push_back({.name = layer.module + std::string(kDown), .shape = {options_.rank, in}, .init = random});
    unit.params.push_back({.name = layer.module + std::string(kUp), .shape = {rows, options_.rank}, .init = zeros()});
  }
}

void LoraTargets::finish(Model& model) const {
  if (options_.rank == 0) return;
  std::vector<std::string> names = layers_;
  names.insert(names.end(), many_names_.begin(), many_names_.end());
  const std::string allowed = names.empty() ? "no target, this model names no linear layer"
                                            : fmt::format("{}, or patterns of them with *", fmt::join(names, ", "));
  if (options_.targets.empty())
    throw UsageError(fmt::format("model.lora.targets: value [] names no linear layer; allowed: {}", allowed));
  for (std::size_t t = 0; t < matched_.size(); ++t)
    if (!matched_[t])
      throw UsageError(fmt::format("model.lora.targets: value '{}' is no linear layer of this model; allowed: {}",
                                   options_.targets[t], allowed));
  for (UnitSpec& unit : model.units)
    for (ParamInfo& param : unit.params) param.trainable = param.trainable && is_adapter(param);
}

}  // namespace regather
