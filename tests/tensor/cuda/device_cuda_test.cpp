// The CUDA device on the emulator: memory, streams, events, copies, optimizer arithmetic, and what it says of faults.
#include "tensor/cuda/device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tensor/block.h"
#include "tensor/ops/dropout.h"
#include "tensor/ops/embedding.h"
#include "tensor/ops/gpu_ops.h"
#include "tensor/ops/linear_cross_entropy.h"
#include "tensor/ops/optimizer.h"
#include "tests/cuda_emu/machine.h"
#include "tests/tensor/cuda/on_device.h"
#include "tests/tensor/ops/op_case.h"

namespace regather::testing {
namespace {

const std::vector<std::string> kNone{};

class CudaDevices : public ::testing::Test {
 protected:
  ~CudaDevices() override { EXPECT_EQ(machine.findings(), kNone); }
  cuda_emu::Machine machine{{.devices = 2, .capacity = std::size_t{128} << 20, .blocks_apart = 0}};
};

TEST_F(CudaDevices, copy_through_staging_smaller_than_the_data) {
  CudaDevice device(0, 0, 4 * 256);
  const std::vector<float> x = numbers(1000);
  EXPECT_EQ(on_host(device, on_device(device, x)), x);
}

TEST_F(CudaDevices, write_takes_what_it_was_given) {
  CudaDevice device(0);
  std::vector<float> x = numbers(64);
  const std::vector<float> before = x;
  const Buffer buffer = on_device(device, x);
  std::fill(x.begin(), x.end(), 0.0F);
  EXPECT_EQ(on_host(device, buffer), before);
}

TEST_F(CudaDevices, count_by_tag_and_refuse_over_the_limit) {
  CudaDevice device(0, std::int64_t{64} << 20);
  const std::int64_t fixed = device.memory.live(Tag::Workspace);
  {
    const Buffer a(device.memory, 1000, Tag::Activations), b(device.memory, 500, Tag::Host);
    EXPECT_EQ(device.memory.live(Tag::Activations), 1000);
    EXPECT_EQ(device.memory.live_total(), fixed + 1000) << "pinned memory is the host's";
    EXPECT_THROW(Buffer(device.memory, std::int64_t{64} << 20, Tag::Gathered), OutOfMemory);
  }
  EXPECT_EQ(device.memory.live_total(), fixed);
}

TEST_F(CudaDevices, that_do_not_exist_are_named) {
  EXPECT_EQ(make_cuda_device(1, 0)->kind(), DeviceKind::Cuda);
  expect_error([] { make_cuda_device(2, 0); }, {"GPU 2 of 2"});
}

TEST(CudaDevice, says_the_drivers_word_where_there_is_none) {
  const cuda_emu::Machine machine({.devices = 0});
  expect_error([] { make_cuda_device(0, 0); }, {"there is no GPU here: no CUDA-capable device is detected"});
}

TEST_F(CudaDevices, say_when_the_gpu_has_no_more) {
  CudaDevice device(0);
  expect_error([&] { Buffer(device.memory, std::int64_t{1} << 30, Tag::Activations); },
               {"out of memory", "1.00 GiB of activations", "the system has no more"});
}

TEST_F(CudaDevices, memory_is_freed_in_the_order_of_compute) {
  CudaDevice device(0);
  const std::vector<float> x = numbers(256);
  const Buffer sum = on_device(device, std::vector<float>(256, 0.0F));
  for (int i = 0; i < 3; ++i) {  // each buffer is freed while the addition may still be to come
    const Buffer part = on_device(device, x);
    device.add(Stream::Compute, sum.data<float>(), sum.data<float>(), part.data<float>(), 256);
  }
  std::vector<float> expected(256);
  for (std::size_t i = 0; i < x.size(); ++i) expected[i] = x[i] + x[i] + x[i];
  EXPECT_EQ(on_host(device, sum), expected);
}

TEST_F(CudaDevices, pinned_blocks_are_used_again_only_after_all_streams_have_passed) {
  CudaDevice device(0);
  const Buffer target(device.memory, 4096, Tag::Workspace);
  device.wait(Stream::ToDevice, device.record(Stream::Compute));
  for (int i = 0; i < 20; ++i) {
    const Buffer from(device.memory, 4096, Tag::Host);
    std::fill_n(from.data<float>(), 1024, static_cast<float>(i));
    device.copy(Stream::ToDevice, target.data(), from.data(), 4096);
  }
  device.wait(Stream::Compute, device.record(Stream::ToDevice));
  EXPECT_EQ(on_host(device, target), std::vector<float>(1024, 19.0F));
}

TEST_F(CudaDevices, sum_and_count_as_the_cpu_does) {
  CudaDevice device(0);
  std::vector<float> x = numbers(5000);
  x[17] = INFINITY;
  x[4999] = NAN;
  const Buffer buffer = on_device(device, x);
  EXPECT_EQ(device.gpu()->count_nonfinite(buffer.data<float>(), 5000), 2);
  EXPECT_EQ(device.gpu()->count_nonfinite(buffer.data<float>() + 1, 4998), 1);
  x[17] = x[4999] = 1;
  const Buffer squared = on_device(device, x);
  std::vector<std::span<const float>> arrays;  // more than there is room for the sums of
  for (std::size_t i = 0; i < 700; ++i) arrays.emplace_back(squared.data<float>() + i, i % 3 == 0 ? 5000 - i : 1);
  const std::vector<double> sums = sums_of_squares(device, arrays);
  ASSERT_EQ(sums.size(), arrays.size());
  for (std::size_t i = 0; i < sums.size(); ++i)
    EXPECT_NEAR(sums[i], sum_of_squares(x.data() + i, std::ssize(arrays[i])), 1e-9 * 5000) << i;
}

TEST_F(CudaDevices, step_the_optimizer_as_the_cpu_does) {
  CudaDevice device(0);
  const std::vector<float> g = numbers(1003, 1);
  std::vector<float> p = numbers(1003, 2), m = numbers(1003, 3), v(1003, 0.25F);
  const Buffer dp = on_device(device, p), dm = on_device(device, m), dv = on_device(device, v),
               dg = on_device(device, g);
  const AdamWStep step = {.lr = 0.01F, .weight_decay = 0.1F, .step = 3, .gradient_scale = 0.5F};
  adamw(p.data(), m.data(), v.data(), g.data(), 1003, step);
  device.gpu()->adamw(dp.data<float>(), dm.data<float>(), dv.data<float>(), dg.data<float>(), 1003, factors_of(step));
  const auto expect_close = [](const std::vector<float>& a, const std::vector<float>& b) {
    for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 2e-6 * std::max(1.0F, std::abs(b[i])));
  };
  expect_close(on_host(device, dp), p);
  expect_close(on_host(device, dm), m);
  expect_close(on_host(device, dv), v);
  sgd(p.data(), m.data(), g.data(), 1003, {.lr = 0.1F, .momentum = 0.9F, .weight_decay = 0.01F, .gradient_scale = 2});
  device.gpu()->sgd(dp.data<float>(), dm.data<float>(), dg.data<float>(), 1003, 2, 0.01F, 0.1F, 0.9F);
  expect_close(on_host(device, dp), p);
  expect_close(on_host(device, dm), m);
}

TEST_F(CudaDevices, drop_what_the_cpu_drops) {
  CudaDevice device(0);
  for (const Shape& shape : {Shape{3, 11, 64}, Shape{2, 7, 5}, Shape{1, 1, 4099}}) {
    const OpCase c = {.name = "", .inputs = {{shape}}, .params = {}, .apply = [](regather::Run& run, const auto& a) {
                        return dropout(run, a[0], 0.3F);
                      }};
    const Result cuda = run(c, device), cpu = run(c);
    EXPECT_TRUE(same_bits(cuda.y, cpu.y)) << shape.to_string();
    EXPECT_TRUE(same_bits(cuda.din[0], cpu.din[0])) << shape.to_string();
  }
}

TEST_F(CudaDevices, report_a_target_outside_the_vocabulary) {
  CudaDevice device(0);
  const OpCase c = {
      .name = "",
      .inputs = {{{2, 3, 4}}, {{2, 3}, DType::I32, 8, 9}},
      .params = {{8, 4}},
      .apply = [](regather::Run& run, const Activations& a) { return linear_cross_entropy(run, a[0], a[1], 0); }};
  expect_error([&] { evaluate(c, device); }, {"linear_cross_entropy: target 8 in row", "[0, 8)"});
}

TEST_F(CudaDevices, report_a_token_outside_the_vocabulary) {
  CudaDevice device(0);
  const OpCase c = {.name = "",
                    .inputs = {{{2, 3}, DType::I32, 9, 10}},
                    .params = {{8, 4}},
                    .apply = [](regather::Run& run, const Activations& a) { return embedding(run, a[0], 0, -1); }};
  expect_error([&] { evaluate(c, device); },
               {"embedding: token 9 at sequence 0, position 0 is outside the vocabulary [0, 8)"});
}

}  // namespace
}  // namespace regather::testing
