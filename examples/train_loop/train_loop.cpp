// A training loop of one's own, without YAML and without the command line: a model, batches from anywhere, and
// Trainer::step, which does everything else. Runs alone, or as every rank of mpirun.
#include <cstdlib>

#include "launcher/command_line.h"
#include "launcher/trainer.h"
#include "model/registry.h"

namespace {

using namespace regather;

constexpr std::int64_t kLayers = 4, kVocab = 32, kSequence = 32;
constexpr std::int64_t kSteps = 30, kSequencesOfAStep = 8;

// This rank's part of a step: sequences that count upwards, so that each token says what the next one is.
Batch make_batch(Allocator& memory, const BatchGrid& grid, int rank, std::int64_t step) {
  const Shape shape{grid.micro_batch, kSequence};
  Batch batch{.tokens = Tensor(memory, shape, Tag::Workspace, DType::I32),
              .targets = Tensor(memory, shape, Tag::Workspace, DType::I32),
              .first_sequence = grid.first_sequence(rank, 0)};
  for (std::int64_t i = 0; i < shape.numel(); ++i) {
    const std::int64_t token = 7 * step + 3 * (batch.first_sequence + i / kSequence) + i % kSequence;
    batch.tokens.fresh<std::int32_t>()[i] = static_cast<std::int32_t>(token % kVocab);
    batch.targets.fresh<std::int32_t>()[i] = static_cast<std::int32_t>((token + 1) % kVocab);
  }
  return batch;
}

TrainerOptions options() {
  TrainerOptions o;
  o.checkpoint = make_checkpoint_plan({.policy = "full"}, static_cast<int>(kLayers));
  o.plan.slots = 2;             // full blocks that a rank holds at a time
  o.strategy = Strategy::Full;  // parameters, gradients and optimizer state are sharded
  o.optimizer = {.weight_decay = 0.01};
  o.learning_rate = {.shape = LearningRate::Shape::Constant, .peak = 3e-3};
  return o;
}

void train(Device& device, Communicator& comm) {
  check(kSequencesOfAStep % comm.size() == 0, "{} sequences do not split over {} ranks", kSequencesOfAStep,
        comm.size());
  const BatchGrid grid{.ranks = comm.size(), .micro_batch = kSequencesOfAStep / comm.size()};
  const Model model = make_model(
      {.type = "llama", .layers = kLayers, .hidden = 64, .heads = 4, .vocab = kVocab, .max_sequence = kSequence});
  Trainer trainer(model, device, comm, options());
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const Batch batch = make_batch(device.memory, grid, comm.rank(), step);
    const StepReport report = trainer.step({&batch, 1});  // a micro-batch; more of them accumulate
    if (comm.rank() == 0)
      fmt::print("step {} loss {:.9g} norm {:.9g} recomputed {:.0f} MFLOP\n", report.step, report.loss,
                 report.grad_norm, report.recomputed_flops / 1e6);
  }
  if (comm.rank() == 0) fmt::print("peak {} bytes\n", device.memory.peak_total());
}

}  // namespace

int main() {
  const bool launched = launch_place(std::getenv).ranks > 1;
  const auto comm = launched ? make_mpi_communicator({}) : make_single_communicator({});
  CpuDevice device;  // owns every byte of this rank; outlives leave(), since others may still read what they were given
  try {
    train(device, *comm);
    return 0;
  } catch (const Error& e) {
    fmt::print(stderr, "rank {}: {}\n", comm->rank(), e.what());
    comm->leave(e.what(), e.code());  // the others end too, instead of waiting for this one
    return static_cast<int>(e.code());
  }
}
