#include "launcher/calibrate.h"

#include <omp.h>

#include <algorithm>
#include <optional>

#include "launcher/run_device.h"
#include "launcher/training_run.h"
#include "tensor/recorder.h"

namespace regather {
namespace {

constexpr std::int64_t kBlocks = 4, kMicroBatches = 2;
constexpr int kUnmeasured = 2, kMeasured = 7;  // steps
constexpr auto kLimitsEach = std::chrono::milliseconds(50);

// Blocks that are run again and one that is not, so that every operation is seen in every role.
Config few_blocks(const Config& config) {
  Config few = config;
  few.model.layers = std::min(config.model.layers, kBlocks);
  few.train.accumulation = std::min(config.train.accumulation, kMicroBatches);
  few.train.global_batch = 0;
  few.activation_checkpointing.policy = "full";
  few.activation_checkpointing.offload = {};
  few.sharding.resident_slots = std::clamp<std::int64_t>(config.sharding.resident_slots, 1, few.model.layers);
  few.sharding.prefetch.reset();
  few.memory.limit = 0;
  return few;
}

// Copies as they are in a step: beside its computation.
void learn_copies(CostModel& costs, const Config& few, RunInputs& inputs, Communicator& comm) {
  Config moving = few;
  moving.activation_checkpointing.offload = {.marks = {"all"}};
  const RunDevice run = take_run_device(moving, comm, 0);
  Device& device = *run.device;
  Trainer trainer(inputs.model, device, comm, trainer_options(moving));
  for (int step = 0; step < kUnmeasured; ++step) trainer.step(inputs.batches(device, comm.rank(), step));
  for (const Stream direction : {Stream::ToHost, Stream::ToDevice})
    costs.learn_copies(direction, device.copies(direction));
}

// A step that fails leaves no recorder behind on the communicator, which outlives it.
struct Detach {
  Communicator& comm;
  ~Detach() { comm.set_recorder(nullptr); }
};

CostModel mean_over_ranks(const CostModel& mine, Communicator& comm) {
  std::vector<CostModel> of_ranks;
  for (const std::string& text : comm.exchange(mine.to_json({}))) of_ranks.push_back(CostModel::from_json(text));
  return CostModel::mean(of_ranks);
}

}  // namespace

CostModel calibrate(const Config& config, Communicator& comm) {
  const Config few = few_blocks(config);
  RunInputs inputs(few, comm.size());
  comm.barrier({"scalars", Pass::Step});
  Recorder recorder;
  const Detach detach{comm};
  std::vector<Recorder::Recording> recordings;
  std::vector<double> wire_bytes;
  std::optional<CostModel> costs;
  {
    const RunDevice run = take_run_device(few, comm, 0);
    costs.emplace(limits_of(run, few.precision.element(), kLimitsEach));
    Device& device = *run.device;
    Trainer trainer(inputs.model, device, comm, trainer_options(few));
    for (std::int64_t step = 0; step < kUnmeasured + kMeasured; ++step) {
      const std::vector<Batch> batches = inputs.batches(device, comm.rank(), step);
      if (step == kUnmeasured) {
        record_into(&recorder, device);
        comm.set_recorder(&recorder);
      }
      trainer.step(batches);
      if (step < kUnmeasured) continue;
      recordings.push_back(recorder.take());
      wire_bytes.push_back(static_cast<double>(comm.ledger().wire_bytes()));
    }
  }
  std::vector<CostModel::Step> steps;
  for (std::size_t i = 0; i < recordings.size(); ++i) steps.push_back({recordings[i].intervals, wire_bytes[i]});
  costs->learn(steps);
  learn_copies(*costs, few, inputs, comm);
  return mean_over_ranks(*costs, comm);
}

CostPlace cost_place(const Config& config, std::int64_t ranks, const std::optional<GpuInfo>& gpu) {
  const DType compute = config.precision.element();
  if (!gpu) return cost_place(config.threads, ranks, compute);
  return {fmt::format("{}, {}", gpu->name, name_of(compute)), 1, ranks};
}

CostModel costs_for(const Config& config, const RunDevice& run, Communicator& comm) {
  const CostPlace place = cost_place(config, comm.size(), run.gpu);
  std::string text;
  if (comm.rank() == 0)
    if (const auto known = load_costs(place)) text = known->to_json(place);
  text = comm.exchange(text).front();  // rank 0's: the machines of others may know something else
  if (!text.empty()) return CostModel::from_json(text);
  return mean_over_ranks(CostModel(limits_of(run, config.precision.element(), kLimitsEach)), comm);
}

CostModel costs_for(const Config& config, int world) {
  const std::optional<GpuInfo> gpu = gpu_to_plan_for(config);
  if (auto known = load_costs(cost_place(config, world, gpu))) return std::move(*known);
  if (gpu) return CostModel(gpu->limits(config.precision.element()));
  omp_set_num_threads(static_cast<int>(config.threads));
  return CostModel(measure_limits(kLimitsEach, steady_seconds));
}

}  // namespace regather
