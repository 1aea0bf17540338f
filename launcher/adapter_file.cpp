#include "launcher/adapter_file.h"

#include <algorithm>
#include <bit>
#include <cctype>
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

}  // namespace

std::vector<NamedTensor> gather_adapters(StackRunner& stack, Device& device, Communicator& comm) {
  std::vector<NamedTensor> tensors;
  for (auto& unit : stack.units()) {
    if (std::ranges::none_of(unit->table(), is_adapter)) continue;
    const Buffer values = unit->whole_values(Pass::Save);
    for (std::size_t i = 0; comm.rank() == 0 && i < unit->table().size(); ++i) {
      const ParamInfo& info = unit->table()[i];
      if (!is_adapter(info)) continue;
      const HostView<float> view(device, values.data<float>() + unit->trainable_offset(static_cast<int>(i)),
                                 info.shape.numel());
      tensors.push_back({info.name, info.shape, {view.begin(), view.end()}});
    }
  }
  return tensors;
}

Ledger::Entries expected_of_adapters(StackRunner& stack, int world) {
  Ledger ledger;
  for (const auto& unit : stack.units()) {
    if (std::ranges::none_of(unit->table(), is_adapter) || unit->whole()) continue;
    const std::int64_t shard = unit->trainable_layout().shard() * static_cast<std::int64_t>(sizeof(float));
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
