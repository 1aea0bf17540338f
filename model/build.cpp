#include "model/build.h"

#include <fnmatch.h>

#include <cmath>
#include <utility>

namespace regather {

ParamInfo weight(std::string name, std::int64_t out, std::int64_t in, Init init) {
  return {.name = std::move(name), .shape = {out, in}, .init = init};
}

ParamInfo bias(std::string name, std::int64_t n) {
  return {.name = std::move(name), .shape = {n}, .init = zeros(), .decay = false};
}

ParamInfo norm_gain(std::string name, std::int64_t n) {
  return {.name = std::move(name), .shape = {n}, .init = ones(), .decay = false};
}

Init residual_init(const ModelConfig& config) {
  return normal(config.init_std / std::sqrt(2.0F * static_cast<float>(config.layers)));
}

void check_sizes(const ModelConfig& m) {
  const auto positive = [](std::string_view key, std::int64_t value) {
    if (value < 1) throw UsageError(fmt::format("model.{}: must be at least 1, but is {}", key, value));
  };
  positive("layers", m.layers);
  positive("hidden", m.hidden);
  positive("heads", m.heads);
  positive("ffn_hidden", m.ffn_hidden);
  positive("vocab", m.vocab);
  positive("max_sequence", m.max_sequence);
  if (m.hidden % m.heads != 0)
    throw UsageError(fmt::format("model.heads: {} does not divide model.hidden ({})", m.heads, m.hidden));
  if (!(m.dropout >= 0 && m.dropout < 1))
    throw UsageError(fmt::format("model.dropout: must be at least 0 and below 1, but is {}", m.dropout));
  if (!(m.init_std >= 0 && std::isfinite(m.init_std)))
    throw UsageError(fmt::format("model.init_std: must be at least 0 and finite, but is {}", m.init_std));
}

ModelBuilder::ModelBuilder(const ModelConfig& config) : frozen_(config.frozen), lora_(config.lora) {
  model_.vocab = config.vocab;
  model_.max_sequence = config.max_sequence;
}

int ModelBuilder::unit(UnitSpec spec, const std::vector<LinearLayer>& layers) {
  lora_.add(spec, layers);
  model_.units.push_back(std::move(spec));
  return static_cast<int>(model_.units.size()) - 1;
}

void ModelBuilder::embedding(std::unique_ptr<const Block> block, std::vector<int> units) {
  model_.embedding = {std::move(block), std::move(units)};
}

void ModelBuilder::block(std::unique_ptr<const Block> block, std::vector<int> units) {
  model_.blocks.push_back({std::move(block), std::move(units)});
}

void ModelBuilder::head(std::unique_ptr<const Block> block, std::vector<int> units) {
  model_.head = {std::move(block), std::move(units)};
}

void ModelBuilder::original(std::string prefix, Matrices matrices) {
  model_.prefix_in_files = std::move(prefix);
  model_.transposed_in_files = matrices == Matrices::Transposed;
}

void ModelBuilder::freeze() {
  for (const std::string& pattern : frozen_) {
    bool matched = false;
    for (UnitSpec& unit : model_.units) {
      for (ParamInfo& param : unit.params) {
        if (fnmatch(pattern.c_str(), param.name.c_str(), FNM_NOESCAPE) != 0) continue;
        param.trainable = false;
        matched = true;
      }
    }
    if (matched) continue;
    std::string units;
    for (const UnitSpec& unit : model_.units)
      if (!unit.params.empty()) units += (units.empty() ? "" : ", ") + unit.params.front().name;
    throw UsageError(
        fmt::format("model.frozen: no parameter matches '{}'; the first of each unit: {}", pattern, units));
  }
}

Model ModelBuilder::finish() && {
  lora_.finish(model_);
  freeze();
  return std::move(model_);
}

}  // namespace regather
