// The adapters of a LoRA run as PEFT reads them: a folder with adapter_model.safetensors (fp32, whole tensors) and
// adapter_config.json. Tensors are called base_model.model.<the original's name>.lora_A.weight [rank, inputs] and
// .lora_B.weight [outputs, rank]. Rank 0 writes, each file whole or not at all; an adapter without tensors, or with an
// empty one, is refused. It does not read adapters.
#pragma once
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/stack_runner.h"
#include "model/config.h"

namespace regather {

struct NamedTensor {
  std::string name;
  Shape shape;
  std::vector<float> values;
};

// Whole values of the adapters' parameters, gathered from the shards one unit after the other. Collective; what the
// other ranks than 0 get is empty.
std::vector<NamedTensor> gather_adapters(StackRunner& stack, Device& device, Communicator& comm);
// What that communicates, on this rank.
Ledger::Entries expected_of_adapters(StackRunner& stack, int world);

// The text of a safetensors file: 8 bytes of header length, little-endian; a JSON header; the values, little-endian.
std::string to_safetensors(const std::vector<NamedTensor>& tensors);
// PEFT's adapter_config.json.
std::string to_peft_config(const std::vector<NamedTensor>& tensors, const Model& model, const LoraOptions& lora);

inline constexpr std::string_view kAdapterModel = "adapter_model.safetensors", kAdapterConfig = "adapter_config.json";
// tensors: named as the model names them. Makes the folder.
void write_adapters(const std::filesystem::path& folder, std::vector<NamedTensor> tensors, const Model& model,
                    const LoraOptions& lora);

}  // namespace regather
