// The whole step on real ranks: what crossed the wire according to MPI's own profiling interface equals the closed
// forms, and every number equals the simulated ranks' bit for bit.
#include <gtest/gtest.h>

#include "tests/dist/pmpi_count.h"
#include "tests/launcher/expected_volume.h"
#include "tests/launcher/training_run.h"

namespace regather::testing {
namespace {

struct Measured {
  RunResult result;
  pmpi::Count wire;
};
Measured train_on_mpi(const RunSetup& s) {
  Measured m;
  std::mutex mutex;
  const Model model = make_model(s.model);
  const auto comm = make_mpi_communicator({});
  pmpi::reset();
  run_rank(s, model, *comm, m.result, mutex);
  m.wire = pmpi::count();
  return m;
}

int world() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}
int rank() {
  int r = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &r);
  return r;
}

RunSetup small(const char* policy, int layers, int slots, int micro_batches) {
  RunSetup s;
  s.model.layers = layers;
  s.model.hidden = 16;
  s.policy = {.policy = policy, .segments = 2, .layers = {1}};
  s.plan.slots = slots;
  s.plan.micro_batches = micro_batches;
  s.micro_batch = 1;
  s.steps = 1;
  s.world = world();
  return s;
}

// Bytes that one rank receives, and sends, in the first step: parameters gathered, gradients reduced, and the step's
// scalars.
std::int64_t expected_bytes(const RunSetup& s, std::int64_t block_gathers) {
  const std::int64_t W = s.world, L = s.model.layers, M = s.plan.micro_batches;
  const UnitSizes sizes(s.model, W);
  const std::int64_t gathered =
      block_gathers * sizes.block_shard + M * (2 * sizes.table_shard + sizes.positions_shard + sizes.head_shard);
  const std::int64_t reduced =
      M * (L * sizes.block_shard + 2 * sizes.table_shard + sizes.positions_shard + sizes.head_shard);
  const std::int64_t tensors = 12 * L + 4, scalars = 4 + tensors;
  return (W - 1) * (static_cast<std::int64_t>(size_of(s.compute)) * gathered + 4 * reduced + 8 * scalars);
}

TEST(TrainingOnMpi, BytesOnTheWireEqualTheClosedForms) {
  for (const char* policy : {"none", "full", "every_n_layers", "layers", "segments"})
    for (const int layers : {4, 6})
      for (const int micro : {1, 2})
        for (int slots = 1; slots <= layers; ++slots) {
          RunSetup s = small(policy, layers, slots, micro);
          s.compute = slots % 2 == 0 ? DType::BF16 : DType::F32;
          const int K = layers / 2;
          const std::int64_t gathers = s.policy.policy == "segments" && slots <= K
                                           ? segment_gathers(layers, micro, slots, 2, K)
                                           : batch_major_gathers(layers, micro, slots);
          const Measured m = train_on_mpi(s);
          EXPECT_EQ(m.wire.received_bytes, expected_bytes(s, gathers))
              << policy << " L " << layers << " M " << micro << " D " << slots;
          EXPECT_EQ(m.wire.sent_bytes, expected_bytes(s, gathers));
          EXPECT_EQ(m.wire.library_collectives, 0);
          if (rank() == 0) {
            EXPECT_EQ(total(m.result.collectives[0], Collective::AllGather, "block").count, gathers);
          }
        }
}

TEST(TrainingOnMpi, OfAModelWithAdaptersOnlyTheyAreReduced) {
  for (const char* policy : {"none", "full"})
    for (const int micro : {1, 2}) {
      RunSetup s = small(policy, 4, 2, micro);
      s.model.lora = {.rank = 3, .targets = {"attn.qkv", "mlp.up"}};
      const std::int64_t W = s.world, L = 4, M = micro, C = s.model.hidden, r = 3, tensors = 4 * L;
      const std::int64_t adapters = (r * (C + 3 * C) + r * (C + 4 * C) + W - 1) / W;
      const UnitSizes base(s.model, W);
      const std::int64_t gathered = batch_major_gathers(L, M, 2) * (base.block_shard + adapters) +
                                    M * (2 * base.table_shard + base.positions_shard + base.head_shard);
      const Measured m = train_on_mpi(s);
      const std::int64_t expected =
          (W - 1) * (4 * (gathered + M * L * adapters) + 8 * (4 + tensors));  // as in expected_bytes
      EXPECT_EQ(m.wire.received_bytes, expected) << policy << " M " << micro;
      EXPECT_EQ(m.wire.sent_bytes, expected);
      EXPECT_EQ(m.wire.library_collectives, 0);
      s.steps = 2;
      const RunResult real = train_on_mpi(s).result, simulated = train(s);
      if (rank() == 0) {
        EXPECT_EQ(real.losses, simulated.losses);
      }
    }
}

TEST(TrainingOnMpi, NumbersEqualThoseOfSimulatedRanks) {
  for (const char* type : {"gpt2", "llama"})
    for (const char* policy : {"none", "full", "segments"})
      for (const Strategy strategy : {Strategy::Full, Strategy::Gradients, Strategy::None}) {
        RunSetup s = small(policy, 4, 2, 2);
        s.model.type = type;
        s.model.dropout = 0.1F;
        s.strategy = strategy;
        s.compute = s.policy.policy == "full" ? DType::BF16 : DType::F32;
        s.steps = 2;
        const RunResult real = train_on_mpi(s).result;
        const RunResult simulated = train(s);
        if (rank() == 0) {
          EXPECT_EQ(real.losses, simulated.losses) << type << " " << policy;
          EXPECT_EQ(real.norms, simulated.norms);
        }
        for (const auto& [name, values] : real.gradients)  // this rank's elements; what it does not own is zero here
          for (std::size_t i = 0; i < values.size(); ++i)
            if (values[i] != 0.0F) {
              ASSERT_EQ(values[i], simulated.gradients.at(name)[i]) << name;
            }
      }
}

}  // namespace
}  // namespace regather::testing

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  const int result = RUN_ALL_TESTS();
  MPI_Finalize();
  return result;
}
