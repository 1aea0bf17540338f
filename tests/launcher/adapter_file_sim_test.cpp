// The files that a LoRA run leaves behind: what is in them, whoever held it, and that it is the model that was trained.
#include "launcher/adapter_file.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/launcher/temporary_folder.h"
#include "tests/launcher/training_run.h"

namespace regather::testing {
namespace {

std::string read(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

// A safetensors file, by its specification alone.
std::map<std::string, NamedTensor> read_safetensors(const std::string& file) {
  std::uint64_t length = 0;
  for (std::size_t i = 8; i-- > 0;) length = length << 8 | static_cast<unsigned char>(file.at(i));
  const auto header = nlohmann::json::parse(file.substr(8, length));
  std::map<std::string, NamedTensor> tensors;
  std::size_t bytes = 0;
  EXPECT_EQ((8 + length) % 8, 0U);
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      EXPECT_EQ(entry.at("format"), "pt");
      continue;
    }
    EXPECT_EQ(entry.at("dtype"), "F32");
    NamedTensor t{
        name, Shape{entry.at("shape").at(0).get<std::int64_t>(), entry.at("shape").at(1).get<std::int64_t>()}, {}};
    const auto begin = entry.at("data_offsets").at(0).get<std::size_t>(),
               end = entry.at("data_offsets").at(1).get<std::size_t>();
    EXPECT_EQ(end - begin, static_cast<std::size_t>(t.shape.numel()) * 4) << name;
    t.values.resize((end - begin) / 4);
    std::memcpy(t.values.data(), file.data() + 8 + length + begin, end - begin);
    bytes += end - begin;
    tensors[name] = std::move(t);
  }
  EXPECT_EQ(file.size(), 8 + length + bytes);
  return tensors;
}

RunSetup setup(const std::string& type, int world) {
  RunSetup s;
  s.model.type = type;
  if (type == "llama") {
    s.model.heads = 4;
    s.model.kv_heads = 2;
  }
  s.model.layers = 3;
  s.model.lora = {.rank = 3, .alpha = 6, .targets = {"attn.qkv", "mlp.down"}};
  s.world = world;
  s.micro_batch = 12 / world;
  s.steps = 3;
  return s;
}

// Trains, writes, and returns the loss of an evaluation after the last step. Each of the three blocks is gathered so
// often.
double train_and_write(const RunSetup& s, const std::filesystem::path& folder, int gathers = 1) {
  const Model model = make_model(s.model);
  double loss = 0;
  run_ranks(s.world, {}, [&](Communicator& comm) {
    CpuDevice device;
    Trainer trainer(model, device, comm, trainer_options(s));
    for (int step = 0; step < s.steps; ++step) {
      const Batch batch = make_batch(device, s, comm.rank(), comm.size(), step, 0);
      trainer.step({&batch, 1});
    }
    const Batch batch = make_batch(device, s, comm.rank(), comm.size(), 99, 0);
    const double mine = trainer.evaluate({&batch, 1}).loss;
    comm.reset_ledger();
    auto tensors = gather_adapters(trainer.stack(), device, comm);
    EXPECT_TRUE(differences(expected_of_adapters(trainer.stack(), s.world), comm.ledger().entries()).empty());
    const auto& entries = comm.ledger().entries();
    const auto blocks = entries.find({Collective::AllGather, "block", Pass::Save, DType::F32});
    EXPECT_EQ(blocks == entries.end() ? 0 : blocks->second.count, s.strategy == Strategy::Full ? 3 * gathers : 0);
    EXPECT_EQ(entries.size(), s.strategy == Strategy::Full ? 1U : 0U);
    EXPECT_EQ(tensors.empty(), comm.rank() != 0);
    EXPECT_EQ(device.memory.live(Tag::Gathered), 0);
    if (comm.rank() != 0) return;
    loss = mine;
    write_adapters(folder, std::move(tensors), model, s.model.lora);
  });
  return loss;
}

// One rank that has never trained, with the file's adapters.
double evaluate_loaded(RunSetup s, const std::map<std::string, NamedTensor>& tensors, const std::string& prefix) {
  s.world = 1;
  s.micro_batch = 12;
  const Model model = make_model(s.model);
  const auto comm = make_single_communicator({});
  CpuDevice device;
  Trainer trainer(model, device, *comm, trainer_options(s));
  std::size_t loaded = 0;
  for (auto& unit : trainer.stack().units())
    for (const ShardUnit::OwnedPiece& piece : unit->updated()) {
      const NamedTensor& t = tensors.at(prefix + unit->table()[static_cast<std::size_t>(piece.param)].name);
      EXPECT_EQ(piece.size, t.shape.numel());
      std::copy(t.values.begin(), t.values.end(), piece.value);
      ++loaded;
    }
  EXPECT_EQ(loaded, tensors.size());
  const Batch batch = make_batch(device, s, 0, 1, 99, 0);
  return trainer.evaluate({&batch, 1}).loss;
}

TEST(AdapterFile, HoldsTheWholeTrainedAdapterOnAnyNumberOfRanks) {
  for (const char* type : {"gpt2", "llama"})
    for (const int world : {1, 2, 3})
      for (const Strategy strategy : {Strategy::Full, Strategy::Gradients}) {
        const TemporaryFolder folder;
        RunSetup s = setup(type, world);
        s.strategy = strategy;
        const double before = train_and_write(s, folder.path());
        const auto tensors = read_safetensors(read(folder.path() / kAdapterModel));
        const bool llama = s.model.type == "llama";
        EXPECT_EQ(tensors.size(), 2U * (llama ? 4 : 2) * 3);
        for (const auto& [name, t] : tensors) {
          EXPECT_TRUE(std::ranges::any_of(t.values, [](float v) { return v != 0; })) << name;
          EXPECT_TRUE(std::ranges::all_of(t.values, [](float v) { return std::isfinite(v); })) << name;
        }
        const std::string prefix = llama ? "base_model.model." : "base_model.model.transformer.";
        EXPECT_NEAR(evaluate_loaded(s, tensors, prefix), before, 1e-6 * before) << type << " " << world;
        RunSetup base = s;
        base.steps = 0;
        std::map<std::string, NamedTensor> untrained = tensors;
        for (auto& [name, t] : untrained)
          if (name.ends_with("lora_B.weight")) std::fill(t.values.begin(), t.values.end(), 0.0F);
        EXPECT_GT(std::abs(evaluate_loaded(base, untrained, prefix) - before), 1e-4 * before);
      }
}

TEST(AdapterFile, HoldsBothMatricesOfAPairOfWhichOneIsFrozen) {
  std::map<std::string, NamedTensor> start;
  for (const int world : {1, 2, 3}) {
    const TemporaryFolder folder;
    RunSetup s = setup("gpt2", world);
    s.model.frozen = {"*.lora_A.weight"};
    train_and_write(s, folder.path(), 2);
    const auto tensors = read_safetensors(read(folder.path() / kAdapterModel));
    EXPECT_EQ(tensors.size(), 12U);
    if (start.empty()) start = tensors;
    for (const auto& [name, t] : tensors) {
      EXPECT_TRUE(std::ranges::any_of(t.values, [](float v) { return v != 0; })) << name;
      const bool frozen = name.ends_with("lora_A.weight");
      EXPECT_TRUE(!frozen || t.values == start.at(name).values) << name << ", " << world;
    }
  }
}

TEST(AdapterFile, NamesAndShapesArePefts) {
  const TemporaryFolder folder;
  train_and_write(setup("gpt2", 2), folder.path());
  const auto gpt2 = read_safetensors(read(folder.path() / kAdapterModel));
  const std::string h = "base_model.model.transformer.h.2.";
  EXPECT_EQ(gpt2.at(h + "attn.c_attn.lora_A.weight").shape, (Shape{3, 32}));
  EXPECT_EQ(gpt2.at(h + "attn.c_attn.lora_B.weight").shape, (Shape{96, 3}));
  EXPECT_EQ(gpt2.at(h + "mlp.c_proj.lora_A.weight").shape, (Shape{3, 128}));
  EXPECT_EQ(gpt2.at(h + "mlp.c_proj.lora_B.weight").shape, (Shape{32, 3}));
  auto config = nlohmann::json::parse(read(folder.path() / kAdapterConfig));
  EXPECT_EQ(config.at("peft_type"), "LORA");
  EXPECT_EQ(config.at("r"), 3);
  EXPECT_EQ(config.at("lora_alpha"), 6);
  EXPECT_EQ(config.at("fan_in_fan_out"), true);
  EXPECT_EQ(config.at("target_modules"), nlohmann::json::parse(R"(["attn.c_attn", "mlp.c_proj"])"));

  train_and_write(setup("llama", 2), folder.path());
  const auto llama = read_safetensors(read(folder.path() / kAdapterModel));
  const std::string p = "base_model.model.model.layers.1.";
  EXPECT_EQ(llama.at(p + "self_attn.q_proj.lora_B.weight").shape, (Shape{32, 3}));
  EXPECT_EQ(llama.at(p + "self_attn.k_proj.lora_B.weight").shape, (Shape{16, 3}));
  EXPECT_EQ(llama.at(p + "self_attn.v_proj.lora_A.weight").shape, (Shape{3, 32}));
  EXPECT_EQ(llama.at(p + "mlp.down_proj.lora_B.weight").shape, (Shape{32, 3}));
  config = nlohmann::json::parse(read(folder.path() / kAdapterConfig));
  EXPECT_EQ(config.at("fan_in_fan_out"), false);
  EXPECT_EQ(config.at("target_modules"),
            nlohmann::json::parse(R"(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"])"));
}

TEST(AdapterFile, AnEmptyAdapterIsAnError) {
  const TemporaryFolder temporary;
  const std::filesystem::path folder = temporary.path() / "adapter";
  const Model model = make_model(setup("gpt2", 1).model);
  EXPECT_THROW(write_adapters(folder, {}, model, {}), Error);
  EXPECT_THROW(write_adapters(folder, {{"h.0.attn.c_attn.lora_A.weight", Shape{3, 32}, {}}}, model, {}), Error);
  EXPECT_THROW(write_adapters(folder, {{"h.0.attn.c_attn.lora_A.weight", Shape{0, 32}, {}}}, model, {}), Error);
  EXPECT_FALSE(std::filesystem::exists(folder));
}

TEST(AdapterFile, AFolderThatCannotBeMadeIsNamed) {
  const Model model = make_model(setup("gpt2", 1).model);
  try {
    write_adapters("/proc/adapter", {{"h.0.attn.c_attn.lora_A.weight", Shape{1, 1}, {1.0F}}}, model, {});
    FAIL() << "written";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("/proc/adapter"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace regather::testing
