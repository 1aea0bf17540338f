// Whole runs of `regather train` with `device: cuda`: what is trained and written is what `device: cpu` trains and
// writes within bounds, and a rank's peak is the one that was planned, to the byte.
#include "launcher/training_run.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "launcher/adapter_file.h"
#include "launcher/calibrate.h"
#include "launcher/check.h"
#include "launcher/compare_measure.h"
#include "launcher/fit.h"
#include "launcher/plan.h"
#include "tensor/gpu_room.h"
#include "tests/cuda_emu/machine.h"
#include "tests/dist/cuda_ranks.h"
#include "tests/launcher/temporary_folder.h"

namespace regather::testing {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kRun = R"(
model: {layers: 3, hidden: 16, heads: 2, max_sequence: 16, init_std: 0.2}
data: {sequence: 9}
train: {steps: 3, micro_batch: 2, accumulation: 2, optimizer: {lr: 1.0e-2}}
eval: {every: 3, batches: 1}
communication: {backend: mpi}
)";
constexpr std::string_view kGpt2[] = {"model.dropout=0.1", "activation_checkpointing.policy=selective",
                                      "activation_checkpointing.audit=1"};
constexpr std::string_view kLlama[] = {"model.type=llama", "model.tie_embeddings=false", "model.lora.rank=2",
                                       "activation_checkpointing.offload=all"};

Config config_of(const std::filesystem::path& folder, std::span<const std::string_view> sets, std::string_view device) {
  const std::filesystem::path text = folder / "text.txt";
  std::ofstream stream(text);
  for (int i = 0; i < 4000; ++i) stream << static_cast<char>('a' + i * i % 23);
  std::vector<std::string> all(sets.begin(), sets.end());
  all.push_back(fmt::format("data.files=[{}]", text.string()));
  all.push_back(fmt::format("output={}", (folder / device).string()));
  all.push_back(fmt::format("device={}", device));
  return parse_config(kRun, "run.yaml", all);
}

std::string contents(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

struct Ran {
  Json summary;
  std::string adapter;  // empty: none was written
};

Ran run(const Config& config) {
  EXPECT_EQ(
      run_training(config, {}, [](const Error& e, ErrorOrigin, const LaunchPlace&) { ADD_FAILURE() << e.what(); }), 0);
  const std::filesystem::path folder = config.output;
  return {Json::parse(contents(folder / "summary.json")), contents(folder / "adapter" / kAdapterModel)};
}

Ran run_on_cuda(const Config& config, std::uint64_t seed = 1) {
  cuda_emu::Machine machine({.seed = seed, .devices = 1, .guarded = false});
  Ran ran = run(config);
  EXPECT_EQ(machine.findings(), std::vector<std::string>{});
  EXPECT_EQ(machine.used_bytes(0), 0U) << "everything was given back";
  return ran;
}

// Two ranks as threads that have an emulated GPU each, or share one.
Ran run_two_on_cuda(const Config& config, const MakeTransport& make, int devices) {
  cuda_emu::Machine machine({.devices = devices, .guarded = false});
  const StopSignal stop;
  run_cuda_ranks(
      machine, 2, {}, make, [&](Communicator& comm, CudaDevice&) { TrainingRun(config, {}, stop, comm).run(); },
      devices == 1 ? Gpus::OneForAll : Gpus::OneEach);
  EXPECT_EQ(machine.findings(), std::vector<std::string>{});
  const std::filesystem::path folder = config.output;
  return {Json::parse(contents(folder / "summary.json")), contents(folder / "adapter" / kAdapterModel)};
}

// The header of a safetensors file, and its values.
std::pair<Json, std::vector<float>> tensors_of(const std::string& file) {
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  const std::string_view values = std::string_view(file).substr(sizeof length + length);
  std::vector<float> numbers(values.size() / sizeof(float));
  std::memcpy(numbers.data(), values.data(), values.size());
  return {Json::parse(file.substr(sizeof length, length)), numbers};
}

void expect_near(const Json& cuda, const Json& cpu, double bound) {
  ASSERT_EQ(cuda.size(), cpu.size());
  for (std::size_t i = 0; i < cpu.size(); ++i)
    EXPECT_NEAR(cuda[i].get<double>(), cpu[i].get<double>(), bound * cpu[i].get<double>()) << "step " << i + 1;
}

constexpr double kBound = 1e-4;

void expect_same_run(const Json& cuda, const Json& cpu) {
  expect_near(cuda["loss"], cpu["loss"], kBound);
  expect_near(cuda["grad_norm"], cpu["grad_norm"], kBound);
  EXPECT_NEAR(cuda["eval"][0]["loss"].get<double>(), cpu["eval"][0]["loss"].get<double>(), kBound);
  EXPECT_EQ(cuda["collectives"], cpu["collectives"]);
  EXPECT_EQ(cuda["checkpointing"]["plan"], cpu["checkpointing"]["plan"]);
  EXPECT_EQ(cuda["checkpointing"]["recomputed_flops"], cpu["checkpointing"]["recomputed_flops"]);
  EXPECT_EQ(cuda["device"], "emulated GPU");
  EXPECT_TRUE(cuda["collectives"]["expected_matches"].get<bool>());
}

void expect_planned_memory(const Json& summary) {
  EXPECT_EQ(summary["memory_bytes"]["peak"], summary["predicted"]["peak_bytes"]);
  const Json& at_peak = summary["memory_bytes"]["at_peak"];
  std::int64_t sum = 0;
  for (const Tag tag : kAllTags)
    if (tag != Tag::Host) sum += at_peak[std::string(name_of(tag))].get<std::int64_t>();
  EXPECT_EQ(sum, summary["memory_bytes"]["peak"].get<std::int64_t>());
}

TEST(TrainingRunOnCuda, TrainsAsOnACpuInTheMemoryThatWasPlanned) {
  const TemporaryFolder folder;
  const Ran cpu = run(config_of(folder.path(), kGpt2, "cpu"));
  const Ran cuda = run_on_cuda(config_of(folder.path(), kGpt2, "cuda"));
  expect_same_run(cuda.summary, cpu.summary);
  expect_planned_memory(cpu.summary);
  expect_planned_memory(cuda.summary);
  EXPECT_GE(cuda.summary["memory_bytes"]["at_peak"]["workspace"].get<std::int64_t>(),
            kGpuScratchBytes + kGpuProductsBytes);
}

TEST(TrainingRunOnCuda, WritesTheAdaptersThatACpuWrites) {
  const TemporaryFolder folder;
  const Ran cpu = run(config_of(folder.path(), kLlama, "cpu"));
  const Ran cuda = run_on_cuda(config_of(folder.path(), kLlama, "cuda"), 2);
  expect_same_run(cuda.summary, cpu.summary);
  expect_planned_memory(cuda.summary);
  EXPECT_GT(cuda.summary["checkpointing"]["offload"]["host_bytes"].get<std::int64_t>(), 0);
  const auto [layout, values] = tensors_of(cuda.adapter);
  const auto [expected_layout, expected] = tensors_of(cpu.adapter);
  EXPECT_EQ(layout, expected_layout);
  ASSERT_EQ(values.size(), expected.size());
  ASSERT_FALSE(values.empty());
  for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], expected[i], 1e-4) << "element " << i;
}

TEST(TrainingRunOnCuda, RanksTrainAsOnACpuWithAGpuEachOrSharingOne) {
  const TemporaryFolder folder;
  Config config = config_of(folder.path(), kGpt2, "cpu");
  config.train.accumulation = 1;
  config.communication.backend = "sim";
  config.communication.sim_ranks = 2;
  const Ran cpu = run(config);
  config = config_of(folder.path(), kGpt2, "cuda");
  config.train.accumulation = 1;
  const MakeTransport staged = [](std::unique_ptr<Transport> below, int rank, int size) {
    return make_staged_transport(std::move(below), rank, size, 4096);
  };
  for (const auto& [backend, make, devices] :
       {std::tuple<const char*, MakeTransport, int>{"nccl", make_nccl_transport, 2}, {"staged", staged, 1}}) {
    SCOPED_TRACE(backend);
    config.communication.backend = backend;
    config.output = (folder.path() / backend).string();
    const Ran cuda = run_two_on_cuda(config, make, devices);
    expect_same_run(cuda.summary, cpu.summary);
    expect_planned_memory(cuda.summary);
    EXPECT_EQ(cuda.summary["world"], 2);
  }
}

// ---- bf16, and the other commands --------------------------------------------------------------------------------

constexpr std::string_view kSmall[] = {"model.layers=2", "model.dropout=0.1", "train.accumulation=1",
                                       "precision.compute=bf16"};

void refused(const Error& e, ErrorOrigin, const LaunchPlace&) { ADD_FAILURE() << e.what(); }

TEST(TrainingRunOnCuda, InBf16FollowsFp32InTheMemoryThatWasPlanned) {
  const TemporaryFolder folder;
  const Ran fp32 = run(config_of(folder.path(), kGpt2, "cpu"));
  Config config = config_of(folder.path(), kGpt2, "cuda");
  config.precision.compute = PrecisionConfig::Type::Bf16;
  const Ran bf16 = run_on_cuda(config);
  expect_near(bf16.summary["loss"], fp32.summary["loss"], 0.02);
  expect_near(bf16.summary["grad_norm"], fp32.summary["grad_norm"], 0.05);
  EXPECT_NE(bf16.summary["loss"], fp32.summary["loss"]);
  expect_planned_memory(bf16.summary);
  EXPECT_LT(bf16.summary["memory_bytes"]["peak_of"]["activations"].get<std::int64_t>(),
            fp32.summary["memory_bytes"]["peak_of"]["activations"].get<std::int64_t>());
}

// `none` among them keeps all that is costly; the others recompute, and two move values to the host.
TEST(TrainingRunOnCuda, InBf16EveryPolicyIsComparedAsTheSameBits) {
  const TemporaryFolder folder;
  Config config = config_of(folder.path(), kSmall, "cuda");
  const CompareOptions options{.policies = {"none", "full", "selective"}, .steps = 1, .rounds = 1};
  {
    const cuda_emu::Machine machine({.devices = 1, .guarded = false});
    EXPECT_EQ(run_compare(config, options, refused), 0);
    EXPECT_EQ(machine.findings(), std::vector<std::string>{});
  }
  const Json compared = Json::parse(contents(std::filesystem::path(config.output) / "compare.json"));
  EXPECT_EQ(compared["policies"].size(), 3U);

  config.activation_checkpointing.offload.marks = {"all"};
  config.communication.backend = "nccl";
  cuda_emu::Machine machine({.devices = 2, .guarded = false});
  run_cuda_ranks(machine, 2, {}, make_nccl_transport, [&](Communicator& comm, CudaDevice&) {
    const Comparison c =
        PolicyMeasurement(config, {.policies = {"none", "full"}, .steps = 1, .rounds = 1}, comm, [](auto) {}).run();
    EXPECT_TRUE(holds(c));
    for (const PolicyResult& p : c.policies) {
      EXPECT_TRUE(p.ran() && p.identical) << p.policy << " " << p.refused;
      EXPECT_EQ(p.measured.total, p.planned.total) << p.policy;
      EXPECT_EQ(p.measured.at_peak, p.planned.at_peak) << p.policy;
      EXPECT_EQ(p.tokens, 2 * 2 * 9);
    }
    EXPECT_LT(
        c.policies[1].measured.peak_of[index(Tag::Activations)],
        c.policies[0].measured.peak_of[index(Tag::Host)] + c.policies[0].measured.peak_of[index(Tag::Activations)]);
  });
  EXPECT_EQ(machine.findings(), std::vector<std::string>{});
}

TEST(TrainingRunOnCuda, TheLongestSequenceThatFitsIsTrainedInThePlannedMemory) {
  const TemporaryFolder folder;
  const Config config = config_of(folder.path(), kSmall, "cuda");
  FitOptions options{.policies = {"full"}, .json_file = (folder.path() / "fit.json").string()};
  options.memory = forecast_step(config, make_model(config.model), 0, 1).peak;
  const cuda_emu::Machine machine({.devices = 1, .guarded = false});
  EXPECT_EQ(run_fit(config, options, refused), 0);
  EXPECT_EQ(machine.findings(), std::vector<std::string>{});
  const Json fitted = Json::parse(contents(options.json_file))["policies"][0];
  for (const char* what : {"sequence", "micro_batch"}) {
    EXPECT_TRUE(fitted[what]["confirmed"].get<bool>()) << fitted;
    EXPECT_EQ(fitted[what]["measured_bytes"], fitted[what]["planned_bytes"]);
    EXPECT_GE(fitted[what]["largest"].get<int>(), what[0] == 's' ? 9 : 2);
  }
}

TEST(TrainingRunOnCuda, WhatOperationsCostIsMeasuredOnTheGpuAndPlannedWith) {
  const TemporaryFolder folder;
  ::setenv("XDG_CACHE_HOME", folder.path().c_str(), 1);
  Config config = config_of(folder.path(), kSmall, "cuda");
  PlanOptions options{.world = 1, .calibrate = true, .json_file = (folder.path() / "plan.json").string()};
  {
    const cuda_emu::Machine machine({.devices = 1, .guarded = false});
    EXPECT_EQ(run_plan(config, options, refused), 0);
    EXPECT_EQ(machine.findings(), std::vector<std::string>{});
    const Json measured = Json::parse(contents(options.json_file));
    EXPECT_TRUE(plan_text(config, options).find("emulated GPU") != std::string::npos);
    const Json planned = Json::parse(contents(options.json_file));
    EXPECT_TRUE(measured["step_seconds"]["calibrated"].get<bool>());
    EXPECT_EQ(planned["step_seconds"], measured["step_seconds"]);
    EXPECT_EQ(planned["memory_bytes"]["peak"], forecast_step(config, make_model(config.model), 0, 1).peak);
  }
  config.communication.backend = "nccl";
  cuda_emu::Machine machine({.devices = 2, .guarded = false});
  std::array<std::string, 2> costs;
  run_cuda_ranks(machine, 2, {}, make_nccl_transport, [&](Communicator& comm, CudaDevice&) {
    const CostModel model = calibrate(config, comm);
    EXPECT_TRUE(model.measured());
    costs[static_cast<std::size_t>(comm.rank())] = model.to_json({});
  });
  EXPECT_EQ(machine.findings(), std::vector<std::string>{});
  EXPECT_EQ(costs[0], costs[1]);
  ::unsetenv("XDG_CACHE_HOME");
}

TEST(TrainingRunOnCuda, ALimitBelowThePlanIsRefusedBeforeAnythingIsTrained) {
  const TemporaryFolder folder;
  Config config = config_of(folder.path(), kGpt2, "cuda");
  config.memory.limit = kGpuScratchBytes + kGpuProductsBytes + (64 << 10);  // the device itself fits
  const cuda_emu::Machine machine({.devices = 1, .guarded = false});
  std::string said;
  EXPECT_EQ(run_training(config, {}, [&](const Error& e, ErrorOrigin, const LaunchPlace&) { said = e.what(); }), 3);
  EXPECT_TRUE(said.find("memory.limit: value 48.1 MiB") != std::string::npos) << said;
  EXPECT_FALSE(std::filesystem::exists(config.output));
}

TEST(TrainingRunOnCuda, AMachineWithoutAGpuIsAUsageError) {
  const TemporaryFolder folder;
  const Config config = config_of(folder.path(), kGpt2, "cuda");
  const cuda_emu::Machine machine({.devices = 0, .guarded = false});
  std::string said;
  EXPECT_EQ(run_training(config, {}, [&](const Error& e, ErrorOrigin, const LaunchPlace&) { said = e.what(); }), 2);
  EXPECT_EQ(said,
            "--set device=cuda: device: value cuda, but there is no GPU here: no CUDA-capable device is detected; "
            "allowed: cpu");
  EXPECT_TRUE(
      check_text(config, {}, {}).find("# device: cuda; there is no GPU here: no CUDA-capable device is detected\n") !=
      std::string::npos);
}

}  // namespace
}  // namespace regather::testing
