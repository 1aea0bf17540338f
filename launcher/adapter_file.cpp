#include "launcher/adapter_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <map>
#include <nlohmann/json.hpp>

#include "launcher/summary.h"
#include "model/lora.h"
#include "tensor/host_view.h"

namespace regather {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kPeftPrefix = "base_model.model.";
constexpr std::size_t kHeaderAlignment = 8;  // of the values after the header, as other writers have it

// "h.3.attn.c_attn.lora_A.weight" -> "attn.c_attn": the layer's module in every block.
std::string module_in_block(const std::string& name) {
  const std::size_t end = name.rfind(".lora_");
  std::size_t begin = 0;
  for (std::size_t dot = name.find('.'); dot < end; dot = name.find('.', dot + 1)) {
    const std::size_t next = name.find('.', dot + 1);
    const std::string part = name.substr(dot + 1, next - dot - 1);
    if (!part.empty() && std::ranges::all_of(part, [](unsigned char c) { return std::isdigit(c) != 0; }))
      begin = next + 1;
  }
  return name.substr(begin, end - begin);
}

void check_tensors(const std::vector<NamedTensor>& tensors) {
  if (tensors.empty()) throw Error("the adapter has no tensor");
  for (const NamedTensor& t : tensors)
    if (t.values.empty() || static_cast<std::int64_t>(t.values.size()) != t.shape.numel())
      throw Error(
          fmt::format("adapter tensor {} is {}, but has {} values", t.name, t.shape.to_string(), t.values.size()));
}

// A matrix of a pair may be frozen; the file has both.
constexpr std::array kParts = {ShardUnit::Part::Trainable, ShardUnit::Part::Frozen};
std::vector<int> adapters_in(const ShardUnit& unit, ShardUnit::Part part) {
  std::vector<int> found;
  for (int i = 0; i < std::ssize(unit.table()); ++i)
    if (is_adapter(unit.table()[static_cast<std::size_t>(i)]) && unit.part_of(i) == part) found.push_back(i);
  return found;
}

}  // namespace

std::vector<NamedTensor> gather_adapters(StackRunner& stack, Device& device, Communicator& comm) {
  std::vector<NamedTensor> tensors;
  for (auto& unit : stack.units()) {
    std::map<int, NamedTensor> of_unit;  // by their place in its table
    for (const ShardUnit::Part part : kParts) {
      const std::vector<int> adapters = adapters_in(*unit, part);
      if (adapters.empty()) continue;
      const Buffer values = unit->whole_values(part, Pass::Save);
      for (const int i : adapters) {
        if (comm.rank() != 0) break;
        const ParamInfo& info = unit->table()[static_cast<std::size_t>(i)];
        const HostView<float> view(device, values.data<float>() + unit->offset(i), info.shape.numel());
        of_unit[i] = {info.name, info.shape, {view.begin(), view.end()}};
      }
    }
    for (auto& [i, tensor] : of_unit) tensors.push_back(std::move(tensor));
  }
  return tensors;
}

Ledger::Entries expected_of_adapters(StackRunner& stack, int world) {
  Ledger ledger;
  for (const auto& unit : stack.units())
    for (const ShardUnit::Part part : kParts) {
      if (unit->whole() || adapters_in(*unit, part).empty()) continue;
      const std::int64_t shard = unit->layout(part).shard() * static_cast<std::int64_t>(sizeof(float));
      ledger.add({Collective::AllGather, unit->ledger_name(), Pass::Save, DType::F32},
                 {.count = 1, .logical_bytes = shard * world, .wire_bytes = shard * (world - 1)});
    }
  return ledger.entries();
}

std::string to_safetensors(const std::vector<NamedTensor>& tensors) {
  static_assert(std::endian::native == std::endian::little, "the file is little-endian");
  check_tensors(tensors);
  Json header{{"__metadata__", {{"format", "pt"}}}};
  std::size_t end = 0;
  for (const NamedTensor& t : tensors) {
    Json shape = Json::array();
    for (int d = 0; d < t.shape.ndim(); ++d) shape.push_back(t.shape.dim(d));
    const std::size_t begin = end;
    end += t.values.size() * sizeof(float);
    header[t.name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment, ' ');
  const std::uint64_t length = text.size();
  std::string file(reinterpret_cast<const char*>(&length), sizeof length);
  file.reserve(sizeof length + text.size() + end);
  file += text;
  for (const NamedTensor& t : tensors)
    file.append(reinterpret_cast<const char*>(t.values.data()), t.values.size() * sizeof(float));
  return file;
}

std::string to_peft_config(const std::vector<NamedTensor>& tensors, const Model& model, const LoraOptions& lora) {
  std::vector<std::string> modules;
  for (const NamedTensor& t : tensors) {
    const std::string module = module_in_block(t.name);
    if (std::ranges::find(modules, module) == modules.end()) modules.push_back(module);
  }
  const auto whole = static_cast<std::int64_t>(lora.alpha);
  const bool integral = static_cast<double>(whole) == lora.alpha;
  const Json json{{"peft_type", "LORA"},
                  {"task_type", "CAUSAL_LM"},
                  {"base_model_name_or_path", nullptr},
                  {"inference_mode", true},
                  {"r", lora.rank},
                  {"lora_alpha", integral ? Json(whole) : Json(lora.alpha)},
                  {"lora_dropout", 0.0},
                  {"bias", "none"},
                  {"fan_in_fan_out", model.transposed_in_files},
                  {"target_modules", modules},
                  {"modules_to_save", nullptr}};
  return json.dump(2) + "\n";
}

void write_adapters(const std::filesystem::path& folder, std::vector<NamedTensor> tensors, const Model& model,
                    const LoraOptions& lora) {
  check_tensors(tensors);
  const std::string config = to_peft_config(tensors, model, lora);
  for (NamedTensor& t : tensors) t.name = std::string(kPeftPrefix) + model.prefix_in_files + t.name;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw Error(fmt::format("{}: cannot be made: {}", folder.string(), error.message()));
  write_file(folder / kAdapterModel, to_safetensors(tensors));
  write_file(folder / kAdapterConfig, config);
}

}  // namespace regather
