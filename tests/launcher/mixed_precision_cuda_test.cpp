// Where bf16 goes wrong elsewhere, on GPUs: sums of many small gradients, angles of rotary embeddings, and numbers that
// are not finite on one rank.
#include <gtest/gtest.h>

#include <cmath>

#include "tensor/ops/gpu_ops.h"
#include "tensor/ops/rope.h"
#include "tests/dist/cuda_ranks.h"
#include "tests/dist/toy_units.h"
#include "tests/launcher/training_run.h"
#include "tests/tensor/cuda/on_device.h"

namespace regather::testing {
namespace {

constexpr Bf16 kOne{0x3F80}, kSmall{0x3B00};  // 1, 2^-9

// A bf16 sum of 512 ones stops at 256, and one of 1, 2^-9, 2^-9 and 2^-9 at 1.
TEST(MixedPrecisionOnCuda, AddsUpGradientsOfMicroBatchesAndRanksInFp32) {
  cuda_emu::Machine machine({.devices = 4, .blocks_apart = 0, .guarded = false});
  run_cuda_ranks(machine, 4, {}, make_nccl_transport, [&](Communicator& comm, CudaDevice& device) {
    comm.use_memory_of(device);
    ShardUnit unit(toy::odd_unit(), "block", device, comm, {.reductions_per_step = 5, .compute = DType::BF16});
    const Buffer row(device.memory, 2 * sizeof(Bf16), Tag::Workspace);
    const auto add = [&](Bf16 first, Bf16 second) {
      const Bf16 values[] = {first, second};
      device.write(Stream::Compute, row.data(), values, sizeof values);
      device.gpu()->bf16().add_column_sums(unit.gradients(Tag::Gradients).data(0), row.data<Bf16>(), 1, 2);
    };
    unit.begin_step();
    for (int micro_batch = 0; micro_batch < 512; ++micro_batch) {
      add(comm.rank() == 0 ? kOne : Bf16{}, Bf16{});
      if (micro_batch % 128 == 127) unit.reduce();
    }
    add({}, comm.rank() == 0 ? kOne : kSmall);
    unit.reduce();
    unit.finish_reduction();
    for (const ShardUnit::OwnedPiece& piece : unit.normed()) {
      if (piece.param != 0 || piece.first != 0) continue;
      float sums[2] = {};
      device.read(Stream::Compute, sums, piece.gradient, sizeof sums);
      EXPECT_EQ(sums[0], 512.0F);
      EXPECT_EQ(sums[1], 1 + 3 * 0x1p-9F);
    }
  });
  EXPECT_EQ(machine.findings(), std::vector<std::string>{});
}

// Tables of cosines in bf16 would turn positions 256 and 257 alike, and others by the wrong angle.
TEST(MixedPrecisionOnCuda, RotatesBf16ByExactAngles) {
  constexpr std::int64_t kTokens = 1024, kSize = 8;
  const cuda_emu::Machine machine({.devices = 1, .blocks_apart = 0, .guarded = false});
  CudaDevice device(0);
  const ParamView none;
  std::vector<Bf16> values;
  for (std::int64_t i = 0; i < kTokens * 3 * kSize; ++i) values.push_back(i % (3 * kSize) < kSize / 2 ? kOne : Bf16{});
  Tensor qkv(device.memory, {1, kTokens, 3 * kSize}, Tag::Activations, DType::BF16);
  device.write(Stream::Compute, qkv.fresh<void>(), values.data(), qkv.bytes());
  regather::Run r{device, none};
  const Tensor rotated = rope(r, qkv, 1, 1, 10000);
  const HostView<Bf16> y = host_view<Bf16>(device, rotated);
  for (std::int64_t t = 0; t < kTokens; ++t)
    for (std::int64_t i = 0; i < kSize / 2; ++i) {
      const double angle = static_cast<double>(t) * std::pow(10000.0, -2.0 * static_cast<double>(i) / kSize);
      const double cosine = std::cos(angle), sine = std::sin(angle);
      const Bf16* row = y.data() + t * 3 * kSize;
      ASSERT_NEAR(to_float(row[i]), cosine, std::abs(cosine) / 256 + 1e-6) << t << ", " << i;
      ASSERT_NEAR(to_float(row[kSize / 2 + i]), sine, std::abs(sine) / 256 + 1e-6) << t << ", " << i;
    }
}

using Shards = std::vector<std::vector<float>>;  // by rank: the parameters that it updates

struct Skipping {
  std::vector<std::vector<bool>> skipped;  // by rank and step
  std::vector<Shards> after;               // by step
};

// The first gradient that the faulty rank has is infinite in step 1.
Skipping train_with_overflow(const RunSetup& s, int faulty) {
  cuda_emu::Machine machine({.devices = s.world, .blocks_apart = 0, .guarded = false});
  const Model model = make_model(s.model);
  const auto world = static_cast<std::size_t>(s.world);
  Skipping result{std::vector<std::vector<bool>>(world),
                  std::vector<Shards>(static_cast<std::size_t>(s.steps), Shards(world))};
  run_cuda_ranks(machine, s.world, {}, make_nccl_transport, [&](Communicator& comm, CudaDevice& device) {
    comm.use_memory_of(device);
    Trainer trainer(model, device, comm, trainer_options(s));
    const auto me = static_cast<std::size_t>(comm.rank());
    for (int step = 0; step < s.steps; ++step) {
      trainer.stack().before_action = [&](std::size_t t) {
        if (comm.rank() != faulty || step != 1 || t != trainer.stack().plan().entries.size()) return;
        device.wait(Stream::Compute, device.record(Stream::Reduce));
        const float infinite = INFINITY;
        device.write(Stream::Compute, trainer.stack().units()[0]->normed().at(0).gradient, &infinite, sizeof infinite);
      };
      const Batch batch = make_batch(device, s, comm.rank(), s.world, step, 0);
      result.skipped[me].push_back(trainer.step(std::span(&batch, 1)).skipped);
      for (const auto& unit : trainer.stack().units())
        for (const ShardUnit::OwnedPiece& piece : unit->updated()) {
          const HostView<float> values(device, piece.value, piece.size);
          std::ranges::copy(values, std::back_inserter(result.after[static_cast<std::size_t>(step)][me]));
        }
    }
  });
  EXPECT_EQ(machine.findings(), std::vector<std::string>{});
  return result;
}

TEST(MixedPrecisionOnCuda, OverflowOnOneRankIsAStepThatNoRankTakes) {
  RunSetup s;
  s.model.layers = 2;
  s.model.hidden = 16;
  s.model.vocab = 37;
  s.sequence = 8;
  s.steps = 3;
  s.compute = DType::BF16;
  s.nonfinite = TrainerOptions::Nonfinite::Skip;
  for (const bool offloads : {false, true})
    for (int faulty = 0; faulty < s.world; ++faulty) {
      SCOPED_TRACE(fmt::format("on rank {}{}", faulty, offloads ? ", with offload" : ""));
      s.policy = {.policy = "full"};
      if (offloads) s.policy.offload.names = {"all"};
      const Skipping r = train_with_overflow(s, faulty);
      EXPECT_EQ(r.skipped, std::vector(2, std::vector<bool>{false, true, false}));
      EXPECT_TRUE(r.after[1] == r.after[0]);
      EXPECT_FALSE(r.after[2] == r.after[1]);
      EXPECT_TRUE(std::ranges::all_of(r.after[2][0], [](float x) { return std::isfinite(x); }));
    }
}

}  // namespace
}  // namespace regather::testing
