// What a device's streams and its host wait for: copies through staging, pinned memory, times of copies, values on
// their way to the host and back. Under many orders of the streams; tests/stream_mutants.py takes each wait out.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>

#include "tensor/cuda/device.h"
#include "tensor/hash.h"
#include "tensor/offload.h"
#include "tensor/ops/add.h"
#include "tensor/ops/gpu_ops.h"
#include "tensor/recorder.h"
#include "tests/cuda_emu/machine.h"
#include "tests/cuda_emu/seeds.h"
#include "tests/message_of.h"
#include "tests/tensor/cuda/on_device.h"
#include "tests/tensor/ops/op_case.h"

namespace regather::testing {
namespace {

constexpr std::int64_t kNumbers = 300;

// body(device) under many orders; after it the machine has found nothing, and has all its memory back.
void under_many_orders(const std::function<void(CudaDevice&)>& body) {
  for (std::uint64_t seed = 0;
       seed < static_cast<std::uint64_t>(cuda_emu::testing::seeds(cuda_emu::testing::kSeesRaces ? 1 : 8)); ++seed) {
    SCOPED_TRACE(seed);
    cuda_emu::Machine machine({.seed = seed, .devices = 1, .blocks_apart = 0, .guarded = false});
    {
      CudaDevice device(0, 0, 4 * 256);
      body(device);
    }
    EXPECT_EQ(machine.used_bytes(0), 0U) << "memory is given back, not only asked to be";
    EXPECT_EQ(machine.pinned_bytes(), 0U);
    EXPECT_EQ(machine.findings(), std::vector<std::string>{});
    if (::testing::Test::HasFailure()) return;
  }
}

// Work that a stream is at for a while, if others are let go on before it.
void keep_busy(CudaDevice& device, Stream stream, const Buffer& room) {
  for (int i = 0; i < 4; ++i) device.zero(stream, room.data(), room.bytes());
}

TEST(StreamOrders, of_copies_through_staging) {
  under_many_orders([](CudaDevice& device) {
    const std::vector<float> x = numbers(kNumbers, 1), y = numbers(kNumbers, 2);
    const Buffer a = on_device(device, x);
    device.wait(Stream::ToDevice, device.record(Stream::Compute));
    Buffer b(device.memory, a.bytes(), Tag::Workspace);
    device.wait(Stream::ToDevice, device.record(Stream::Compute));
    std::vector<float> passing = y;
    device.write(Stream::ToDevice, b.data(), passing.data(), b.bytes());
    std::ranges::fill(passing, 0.0F);
    EXPECT_EQ(on_host(device, a), x) << "through pieces that a write on another stream has still to read";
    device.wait(Stream::Compute, device.record(Stream::ToDevice));
    EXPECT_EQ(on_host(device, b), y);
  });
}

TEST(StreamOrders, of_memory_that_comes_and_goes) {
  under_many_orders([](CudaDevice& device) {
    const std::vector<float> x = numbers(kNumbers);
    const Buffer sum = on_device(device, std::vector<float>(kNumbers, 0.0F));
    for (int i = 0; i < 3; ++i) {
      const Buffer part = on_device(device, x);
      device.add(Stream::Compute, sum.data<float>(), sum.data<float>(), part.data<float>(), kNumbers);
    }
    std::vector<float> expected(kNumbers);
    for (std::size_t i = 0; i < x.size(); ++i) expected[i] = x[i] + x[i] + x[i];
    EXPECT_EQ(on_host(device, sum), expected);
  });
}

TEST(StreamOrders, of_pinned_memory_that_is_used_again) {
  for (const Stream stream : {Stream::Compute, Stream::Gather, Stream::Reduce, Stream::ToHost, Stream::ToDevice})
    under_many_orders([&](CudaDevice& device) {
      const Buffer targets(device.memory, 8 * 4096, Tag::Workspace), room(device.memory, 4096, Tag::Workspace);
      device.wait(stream, device.record(Stream::Compute));
      keep_busy(device, stream, room);
      for (int i = 0; i < 8; ++i) {
        const Buffer from(device.memory, 4096, Tag::Host);
        std::fill_n(from.data<float>(), 1024, static_cast<float>(i));
        device.copy(stream, targets.data<float>() + 1024 * i, from.data(), 4096);
      }
      device.wait(Stream::Compute, device.record(stream));
      const std::vector<float> all = on_host(device, targets);
      for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], static_cast<float>(i / 1024)) << i;
    });
}

TEST(StreamOrders, of_a_device_that_ends_while_pinned_memory_is_read) {
  under_many_orders([](CudaDevice& device) {
    const Buffer target(device.memory, 4096, Tag::Workspace), from(device.memory, 4096, Tag::Host);
    device.wait(Stream::ToDevice, device.record(Stream::Compute));
    keep_busy(device, Stream::ToDevice, target);
    device.copy(Stream::ToDevice, target.data(), from.data(), 4096);
    device.wait(Stream::Compute, device.record(Stream::ToDevice));
  });
}

TEST(StreamOrders, of_copies_that_are_counted_when_they_are_done) {
  under_many_orders([](CudaDevice& device) {
    const std::vector<float> x = numbers(1024);
    const Buffer host(device.memory, 4096, Tag::Host), room(device.memory, 4096, Tag::Workspace);
    const Buffer there = on_device(device, x), back(device.memory, 4096, Tag::Workspace);
    device.wait(Stream::ToHost, device.record(Stream::Compute));
    keep_busy(device, Stream::ToHost, room);
    device.copy(Stream::ToHost, host.data(), there.data(), 4096);
    while (device.copies(Stream::ToHost).bytes < 4096) cuda_emu::yield();
    EXPECT_TRUE(std::equal(x.begin(), x.end(), host.data<float>()));
    EXPECT_GT(device.copies(Stream::ToHost).seconds, 0);

    device.wait(Stream::ToDevice, device.record(Stream::Compute));
    keep_busy(device, Stream::ToDevice, room);
    device.copy(Stream::ToDevice, back.data(), host.data(), 4096);
    while (device.copies(Stream::ToDevice).bytes < 4096) cuda_emu::yield();
    EXPECT_EQ(on_host(device, back), x);
  });
}

TEST(StreamOrders, of_an_event_that_the_host_waits_for) {
  under_many_orders([](CudaDevice& device) {
    const std::vector<float> x = numbers(1024);
    const Buffer host(device.memory, 4096, Tag::Host), there = on_device(device, x);
    device.copy(Stream::Compute, host.data(), there.data(), 4096);
    device.record(Stream::Compute).wait();
    EXPECT_TRUE(std::equal(x.begin(), x.end(), host.data<float>()));
  });
}

TEST(StreamOrders, of_intervals_that_are_recorded) {
  under_many_orders([](CudaDevice& device) {
    const std::vector<float> x = numbers(1024);
    const Buffer host(device.memory, 4096, Tag::Host), there = on_device(device, x);
    Recorder recorder;
    record_into(&recorder, device);
    {
      const Timed timed(device.recorder, [] { return Recorder::Interval{.name = "copy"}; });
      device.copy(Stream::Compute, host.data(), there.data(), 4096);
    }
    EXPECT_TRUE(std::equal(x.begin(), x.end(), host.data<float>())) << "an interval ends with its work";
    record_into(nullptr, device);
  });
}

TEST(StreamOrders, of_a_fault_that_is_read_on_another_stream) {
  under_many_orders([](CudaDevice& device) {
    const Buffer table = on_device(device, numbers(32)), rows(device.memory, 4096, Tag::Workspace);
    const Buffer room(device.memory, 4096, Tag::Workspace),
        token = on_device(device, {std::bit_cast<float>(std::int32_t{9})});
    device.wait(Stream::ToHost, device.record(Stream::Compute));
    keep_busy(device, Stream::Compute, room);
    device.gpu()->fp32().embedding(rows.data<float>(), token.data<std::int32_t>(), table.data<float>(), nullptr, 1, 1,
                                   4, 8);
    std::vector<float> other(32);
    EXPECT_EQ(message_of([&] { device.read(Stream::ToHost, other.data(), table.data(), table.bytes()); }),
              "embedding: token 9 at sequence 0, position 0 is outside the vocabulary [0, 8)");
  });
}

TEST(StreamOrders, of_a_hash) {
  const std::vector<float> x = numbers(kNumbers);
  std::vector<float> twice = x;
  for (float& v : twice) v += v;
  under_many_orders([&](CudaDevice& device) {
    Tensor t(device.memory, {kNumbers}, Tag::Workspace);
    device.write(Stream::Compute, t.fresh<void>(), x.data(), t.bytes());
    device.add(Stream::Compute, t.fresh(), t.data(), t.data(), kNumbers);
    EXPECT_EQ(hash_of(device, t), hash_of(twice.data(), twice.size() * sizeof(float)));
  });
}

TEST(StreamOrders, of_two_gradients_of_one_value) {
  const OpCase c = {
      .name = "", .inputs = {{{3, 5}}}, .params = {}, .apply = [](regather::Run& run, const Activations& a) {
        const Tensor twice = add(run, a[0], a[0]);
        return add(run, add(run, a[0], twice), twice);
      }};
  const Result cpu = run(c);
  under_many_orders([&](CudaDevice& device) { EXPECT_TRUE(same_bits(run(c, device).din[0], cpu.din[0])); });
}

// Values that leave and come back, in host memory that is used again; some are given up, at every stage.
TEST(StreamOrders, of_values_on_their_way_to_the_host_and_back) {
  under_many_orders([](CudaDevice& device) {
    Offloader offloader(device);
    const Buffer results(device.memory, 9 * kNumbers * 4, Tag::Workspace);
    std::vector<float> expected;
    int results_so_far = 0;
    unsigned made = 0;
    for (int round = 0; round < 3; ++round) {
      std::vector<Offloaded> kept, dropped;
      for (int i = 0; i < 5; ++i) {
        const std::vector<float> x = numbers(kNumbers, ++made);
        Tensor value(device.memory, {kNumbers}, Tag::Activations);
        device.write(Stream::Compute, value.fresh<void>(), x.data(), value.bytes());
        auto& all = i < 3 ? kept : dropped;
        all.emplace_back(offloader, std::move(value));
        if (i < 3) expected.insert(expected.end(), x.begin(), x.end());
      }
      kept[0].leave();
      kept[1].leave();
      kept[1].fetch();
      dropped[0].leave();
      dropped[0].fetch();  // the other one is still leaving
      dropped.clear();
      for (Offloaded& value : kept) {
        const Tensor back = value.take();
        device.copy(Stream::Compute, results.data<float>() + kNumbers * results_so_far++, back.data<void>(),
                    back.bytes());
      }
    }
    std::vector<float> all = on_host(device, results);
    all.resize(expected.size());
    EXPECT_EQ(all, expected);
  });
}

}  // namespace
}  // namespace regather::testing
