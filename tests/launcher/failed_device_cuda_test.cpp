// A GPU that fails under a training run, as one does whose kernel reads what it may not: whatever was under way, the
// step ends with CUDA's own word, other ranks hear of it, and the process goes on.
#include <gtest/gtest.h>

#include "tests/dist/cuda_ranks.h"
#include "tests/dist/outcome.h"
#include "tests/launcher/training_run.h"

namespace regather::testing {
namespace {

using conformance::Outcome;

constexpr std::string_view kWord = "an illegal memory access was encountered (cudaErrorIllegalAddress)";
constexpr int kFailures = 24;  // spread over a step, which launches some hundred kernels

RunSetup setup_on(int ranks) {
  RunSetup s = setup_of("gpt2");
  s.model.layers = 3;
  s.model.hidden = 16;
  s.model.vocab = 37;
  s.model.max_sequence = s.sequence = 4;
  s.plan.micro_batches = 2;
  s.policy = {.policy = "full"};
  s.policy.offload.names = {"all"};
  s.world = ranks;
  return s;
}

cuda_emu::Options options(int devices, std::uint64_t seed) {
  return {.seed = seed,
          .devices = devices,
          .blocks_apart = 0,
          .guarded = false,
          .most_vain_polls = std::int64_t{1} << 40,
          .late_collectives = true};
}

enum class Doing { Step, Evaluation };

// begins: called when all is made. The device is waited for: what fails in the end is found, too.
void run(const RunSetup& s, const Model& model, Communicator& comm, Device& device, Doing doing,
         const std::function<void()>& begins) {
  comm.use_memory_of(device);
  if (comm.size() > 1) device.between_ops = [&comm] { comm.progress(); };
  {
    Trainer trainer(model, device, comm, trainer_options(s));
    std::vector<Batch> batches;
    for (int m = 0; m < s.plan.micro_batches; ++m) batches.push_back(make_batch(device, s, comm.rank(), s.world, 0, m));
    begins();
    if (doing == Doing::Step)
      trainer.step(batches);
    else
      trainer.evaluate(batches);
    for (const Stream stream : {Stream::Compute, Stream::Gather, Stream::Reduce}) device.record(stream).wait();
  }
  device.between_ops = {};
}

std::int64_t launches(const cuda_emu::Ledger& ledger) {
  std::int64_t sum = 0;
  for (const auto& [name, counts] : ledger.kernels) sum += counts.launches;
  return sum;
}

// What this ends with when the n-th kernel fails, on one rank; empty: all is well. launched: how many there were.
std::string alone(Doing doing, std::int64_t n, std::int64_t* launched = nullptr) {
  const RunSetup s = setup_on(1);
  const Model model = make_model(s.model);
  cuda_emu::Machine machine(options(1, static_cast<std::uint64_t>(n)));
  std::string text;
  try {
    CudaDevice device(0, 0, 64 << 10);
    run(s, model, *make_single_communicator({}), device, doing, [&] {
      machine.ledger() = {};
      machine.fail_kernel(0, n);
    });
  } catch (const Error& e) {
    text = e.what();
  }
  if (launched) *launched = launches(machine.ledger());
  EXPECT_EQ(machine.findings(), std::vector<std::string>{});
  return text;
}

void ends_with_cudas_word(Doing doing) {
  std::int64_t all = 0;
  EXPECT_EQ(alone(doing, std::int64_t{1} << 40, &all), "");
  ASSERT_GT(all, kFailures);
  for (std::int64_t i = 0; i < kFailures; ++i) {
    const std::int64_t n = i * (all - 1) / (kFailures - 1);
    const std::string text = alone(doing, n);
    EXPECT_TRUE(contains(text, kWord)) << "kernel " << n << " of " << all << ": " << text;
  }
}

TEST(FailedDevice, ends_a_step_with_cudas_word) { ends_with_cudas_word(Doing::Step); }
TEST(FailedDevice, ends_an_evaluation_with_cudas_word) { ends_with_cudas_word(Doing::Evaluation); }

class FailedDeviceOfTwo : public ::testing::TestWithParam<const char*> {
 protected:
  // Rank 1's n-th kernel fails.
  Outcome run_two(std::int64_t n, std::int64_t* launched = nullptr) {
    const bool nccl = GetParam() == std::string("nccl");
    const RunSetup s = setup_on(2);
    const Model model = make_model(s.model);
    cuda_emu::Machine machine(options(nccl ? 2 : 1, static_cast<std::uint64_t>(n)));
    const auto staged = [](std::unique_ptr<Transport> below, int rank, int size) {
      return make_staged_transport(std::move(below), rank, size, std::int64_t{2} << 10);
    };
    Outcome outcome(2, [&](const Outcome::Note& note) {
      run_cuda_ranks(
          machine, 2, {}, nccl ? MakeTransport(make_nccl_transport) : MakeTransport(staged),
          [&](Communicator& comm, CudaDevice& device) {
            note(comm.rank(), [&] {
              run(s, model, comm, device, Doing::Step, [&] {
                comm.barrier({"scalars", Pass::Step});
                if (comm.rank() != 1) return;
                machine.ledger() = {};
                machine.fail_kernel(1, n);
              });
            });
          },
          nccl ? Gpus::OneEach : Gpus::OneForAll);
    });
    if (launched) *launched = launches(machine.ledger()) / 2;
    EXPECT_EQ(machine.findings(), std::vector<std::string>{});
    EXPECT_EQ(machine.communicators(), 0);
    return outcome;
  }
};

TEST_P(FailedDeviceOfTwo, ends_both_ranks_with_cudas_word) {
  std::int64_t all = 0;
  EXPECT_EQ(run_two(std::int64_t{1} << 40, &all).thrown, "");
  constexpr std::int64_t kOfTwo = kFailures / 3;
  for (std::int64_t i = 0; i < kOfTwo; ++i) {
    const std::int64_t n = i * (all * 3 / 4) / (kOfTwo - 1);  // of the last ones nothing is waited for in this step
    const Outcome o = run_two(n);
    EXPECT_TRUE(contains(o.thrown, kWord)) << "kernel " << n << " of " << all << ": " << o.thrown;
    EXPECT_EQ(o.texts[1], o.thrown);
    EXPECT_EQ(o.failed_peer[1], -1);
    EXPECT_EQ(o.failed_peer[0], 1) << o.texts[0];
    EXPECT_TRUE(contains(o.texts[0], "rank 1 left: " + o.texts[1])) << o.texts[0];
    EXPECT_LT(o.seconds, 30);  // of 60
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, FailedDeviceOfTwo, ::testing::Values("nccl", "staged"),
                         [](const auto& backend) { return std::string(backend.param); });

}  // namespace
}  // namespace regather::testing
