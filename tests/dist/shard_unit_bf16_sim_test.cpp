// Units whose full copies are bf16.
#include "dist/shard_unit.h"
#include "tensor/ops/kernels.h"
#include "tests/dist/toy_units.h"

namespace regather {
namespace {

using namespace toy;

Floats rounded(const Floats& x) {
  std::vector<Bf16> y(x.size());
  kernels().round(y.data(), x.data(), static_cast<std::int64_t>(x.size()));
  Floats wide;
  for (const Bf16 v : y) wide.push_back(to_float(v));
  return wide;
}
Floats read_bf16(ShardUnit& unit, int i) {
  const auto* data = static_cast<const Bf16*>(unit.data(i));
  Floats values;
  for (std::int64_t k = 0; k < unit.table()[static_cast<std::size_t>(i)].shape.numel(); ++k)
    values.push_back(to_float(data[k]));
  return values;
}

// What operations read is rounded, on every rank the same; what is updated is not, and what is gathered is bf16.
TEST(Bf16ShardUnit, GathersRoundedParametersAndUpdatesExactOnes) {
  for (const Strategy strategy : kStrategies)
    for (const int world : {1, 3}) {
      SCOPED_TRACE(toy::name_of(strategy));
      Whole values;
      on_ranks(world, [&](Communicator& comm) {
        CpuDevice device;
        ShardUnit unit(odd_unit(), "block", device, comm, {.strategy = strategy, .seed = 5, .compute = DType::BF16});
        const auto expect_rounded = [&](float added) {
          const auto lease = unit.acquire(Pass::Forward);
          for (int i = 0; i < 6; ++i) {
            Floats exact = start_values(unit.table()[static_cast<std::size_t>(i)], 5);
            if (unit.table()[static_cast<std::size_t>(i)].trainable)
              for (float& v : exact) v += added;
            EXPECT_EQ(read_bf16(unit, i), rounded(exact)) << i;
          }
        };
        EXPECT_EQ(unit.dtype(), DType::BF16);
        expect_rounded(0);
        constexpr float kSmall = 0x1p-12F;  // less than a rounding of most values
        for (const ShardUnit::OwnedPiece& piece : unit.updated())
          for (std::int64_t i = 0; i < piece.size; ++i) piece.value[i] += kSmall;
        unit.parameters_changed();
        unit.finish_refresh();
        expect_rounded(kSmall);
        const Buffer whole = unit.whole_values(ShardUnit::Part::Trainable, Pass::Save);
        for (int i = 0; i < 6; ++i) {
          const ParamInfo& info = unit.table()[static_cast<std::size_t>(i)];
          if (!info.trainable) continue;
          Floats exact = start_values(info, 5);
          for (float& v : exact) v += kSmall;
          const float* value = whole.data<float>() + unit.offset(i);
          EXPECT_EQ(Floats(value, value + info.shape.numel()), exact) << i;
        }
        for (const auto& [key, counts] : comm.ledger().entries())
          if (key.collective == Collective::AllGather) {
            EXPECT_EQ(key.dtype, key.pass == Pass::Save ? DType::F32 : DType::BF16) << regather::name_of(key.pass);
          }
        if (strategy == Strategy::Full && world == 3) {
          const std::int64_t shard = ceil_div(kTrainable, 3) + ceil_div(kFrozen, 3);
          EXPECT_EQ(comm.ledger().entries().at({Collective::AllGather, "block", Pass::Forward, DType::BF16}).wire_bytes,
                    2 * 2 * shard * 2);
        }
      });
    }
}

TEST(Bf16ShardUnit, HoldsAnFp32ShardAndHalfAsLargeAFullCopy) {
  on_ranks(2, [&](Communicator& comm) {
    for (const Strategy strategy : kStrategies) {
      CpuDevice device;
      ShardUnit unit(odd_unit(), "block", device, comm, {.strategy = strategy, .compute = DType::BF16});
      const std::int64_t shard = ceil_div(kTrainable, 2) + ceil_div(kFrozen, 2);
      const std::int64_t kept = strategy == Strategy::None ? 2 * shard * 4 : shard * 4;
      const std::int64_t replica = strategy == Strategy::Full ? 0 : 2 * shard * 2;
      EXPECT_EQ(device.memory.live(Tag::Parameters), kept + replica) << toy::name_of(strategy);
      const auto lease = unit.acquire(Pass::Forward);
      EXPECT_EQ(device.memory.live(Tag::Gathered), strategy == Strategy::Full ? 2 * shard * 2 : 0);
    }
  });
}

// A bf16 sum of 512 ones stops at 256, and one of 1, 2^-9, 2^-9 and 2^-9 at 1.
TEST(Bf16ShardUnit, AddsUpGradientsOfMicroBatchesAndRanksInFp32) {
  on_ranks(4, [&](Communicator& comm) {
    CpuDevice device;
    ShardUnit unit(odd_unit(), "block", device, comm,
                   {.strategy = Strategy::None, .reductions_per_step = 513, .compute = DType::BF16});
    unit.begin_step();
    for (int micro_batch = 0; micro_batch < 512; ++micro_batch) {
      unit.gradients(Tag::Workspace).data(0)[0] += comm.rank() == 0 ? 1.0F : 0.0F;
      unit.reduce();
    }
    unit.gradients(Tag::Workspace).data(0)[1] += comm.rank() == 0 ? 1.0F : 0x1p-9F;
    unit.reduce();
    unit.finish_reduction();
    const auto pieces = unit.updated();
    EXPECT_EQ(pieces.front().gradient[0], 512.0F);
    EXPECT_EQ(pieces.front().gradient[1], 1 + 3 * 0x1p-9F);
  });
}

}  // namespace
}  // namespace regather
