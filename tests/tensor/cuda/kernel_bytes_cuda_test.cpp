// What each kernel moves between global memory and the threads: the bytes of the formula at the top of its file, in
// whole sectors of 32 bytes. Sizes are multiples of the tiles, memory is aligned.
#include <gtest/gtest.h>

#include <numeric>

#include "tensor/cuda/device.h"
#include "tensor/element.h"
#include "tensor/ops/gpu_ops.h"
#include "tests/cuda_emu/machine.h"
#include "tests/tensor/cuda/on_device.h"

namespace regather::testing {
namespace {

constexpr std::int64_t kN = 4096, kRows = 128, kCols = 256, kSector = 32;
constexpr auto kFloat = static_cast<std::int64_t>(sizeof(float));
template <class T>
constexpr auto kSize = static_cast<std::int64_t>(sizeof(T));

class Moved {
 protected:
  Moved() : device(0, 0, 1 << 20), gpu(*device.gpu()) {}
  ~Moved() { EXPECT_EQ(machine.findings(), std::vector<std::string>{}); }

  template <class T = float>
  T* array(std::int64_t n) {
    float* fp32 = buffers.emplace_back(on_device(device, numbers(n))).data<float>();
    if constexpr (std::is_same_v<T, float>) {
      return fp32;
    } else {
      Bf16* bf16 = buffers.emplace_back(device.memory, 2 * n, Tag::Workspace).data<Bf16>();
      device.round(Stream::Compute, bf16, fp32, n);
      return bf16;
    }
  }
  std::int32_t* integers(const std::vector<std::int32_t>& values) {
    Buffer& buffer = buffers.emplace_back(device.memory, static_cast<std::int64_t>(4 * values.size()), Tag::Workspace);
    device.write(Stream::Compute, buffer.data(), values.data(), buffer.bytes());
    return buffer.data<std::int32_t>();
  }
  void finish() { on_host(device, buffers.front()); }

  struct Sectors {
    std::int64_t loaded, stored;
  };
  // In bytes. Sectors: as many as the bytes fill, unless others are given.
  void expect_moved(const char* kernel, std::int64_t loaded, std::int64_t stored) {
    expect_moved(kernel, loaded, stored, {loaded / kSector, stored / kSector});
  }
  void expect_moved(const char* kernel, std::int64_t loaded, std::int64_t stored, Sectors sectors) {
    finish();
    const cuda_emu::KernelCounts& counts = machine.ledger().kernels.at(kernel);
    EXPECT_EQ(counts.launches, 1) << kernel;
    EXPECT_EQ(counts.loaded, loaded) << kernel;
    EXPECT_EQ(counts.stored, stored) << kernel;
    EXPECT_EQ(counts.loaded_sectors, sectors.loaded) << kernel << ": loads are not coalesced";
    EXPECT_EQ(counts.stored_sectors, sectors.stored) << kernel << ": stores are not coalesced";
  }

  cuda_emu::Machine machine{{.devices = 1, .guarded = false}};
  CudaDevice device;
  GpuOps& gpu;
  std::vector<Buffer> buffers;
};

class KernelBytes : public ::testing::TestWithParam<DType>, protected Moved {};  // T: the parameter, in what follows
class Fp32KernelBytes : public ::testing::Test, protected Moved {};

template <class F>
void with_kernels(DType dtype, GpuOps& gpu, F f) {
  with_element(dtype, [&]<class T>(Element<T> element) { f(element, gpu.on<T>()); });
}
INSTANTIATE_TEST_SUITE_P(Elements, KernelBytes, ::testing::Values(DType::F32, DType::BF16),
                         [](const auto& dtype) { return std::string(name_of(dtype.param)); });

TEST_P(KernelBytes, of_elementwise_operations) {
  with_kernels(GetParam(), gpu, [&]<class T>(Element<T>, GpuElementOps<T>& ops) {
    constexpr std::int64_t kAll = kN * kSize<T>;
    T *x = array<T>(kN), *y = array<T>(kN), *z = array<T>(kN), *u = array<T>(kN), *v = array<T>(kN);
    ops.add(z, x, y, kN);
    expect_moved("add", 2 * kAll, kAll);
    ops.gelu(z, x, kN);
    expect_moved("gelu", kAll, kAll);
    ops.gelu_backward(z, x, y, kN);
    expect_moved("gelu_backward", 2 * kAll, kAll);
    ops.swiglu(z, x, y, kN);
    expect_moved("swiglu", 2 * kAll, kAll);
    ops.swiglu_backward(u, v, x, y, z, kN);
    expect_moved("swiglu_backward", 3 * kAll, 2 * kAll);
    ops.dropout(z, x, 4, kN / 4, {.threshold = 1U << 30, .scale = 2, .key = {.seed = 1}});
    expect_moved("dropout", kAll, kAll);
  });
}

TEST_P(KernelBytes, of_rows_and_columns) {
  with_kernels(GetParam(), gpu, [&]<class T>(Element<T>, GpuElementOps<T>& ops) {
    constexpr std::int64_t kAll = kRows * kCols * kSize<T>, kChunks = kRows / 64;
    T* x = array<T>(kRows * kCols);
    ops.add_column_sums(array(kCols), x, kRows, kCols);
    expect_moved("column_sums", kAll, kChunks * kCols * kFloat);
    expect_moved("add_partial_sums", (kChunks + 1) * kCols * kFloat, kCols * kFloat);
  });
}

TEST_P(KernelBytes, of_norms) {
  with_kernels(GetParam(), gpu, [&]<class T>(Element<T>, GpuElementOps<T>& ops) {
    constexpr std::int64_t kCount = kRows * kCols, kAll = kCount * kSize<T>, kSums = kCount * kFloat;
    T *x = array<T>(kCount), *y = array<T>(kCount), *dx = array<T>(kCount), *gain = array<T>(kCols),
      *bias = array<T>(kCols);
    ops.layer_norm(y, x, gain, bias, kRows, kCols, 1e-5F);
    expect_moved("layer_norm", kAll + 2 * kAll, kAll);  // gain and bias of every row come from the cache
    ops.rms_norm(y, x, gain, kRows, kCols, 1e-5F);
    expect_moved("rms_norm", kAll + kAll, kAll);
    float *dgain = array(kCols), *dbias = array(kCols);
    ops.layer_norm_backward(dx, dgain, dbias, x, gain, y, kRows, kCols, 1e-5F);
    expect_moved("layer_norm_backward", 2 * kAll + 2 * kAll, kAll + 2 * kSums);  // a chunk is one row: 128 < 256
    ops.rms_norm_backward(dx, dgain, x, gain, y, kRows, kCols, 1e-5F);
    expect_moved("rms_norm_backward", 2 * kAll + 2 * kAll, kAll + kSums);
  });
}

TEST_P(KernelBytes, of_rope) {
  with_kernels(GetParam(), gpu, [&]<class T>(Element<T>, GpuElementOps<T>& ops) {
    constexpr AttentionSizes kSizes = {.batch = 2, .tokens = 8, .heads = 2, .kv_heads = 1, .head_size = 64};
    constexpr std::int64_t kCount = 2 * 8 * 4 * 64, kAll = kCount * kSize<T>, kPairs = 2 * 8 * 3 * 32;
    ops.rope(array<T>(kCount), array<T>(kCount), kSizes, 10000, 1);
    expect_moved("rotations", 0, 2 * 8 * 32 * kFloat);
    expect_moved("rope", kAll + 2 * kPairs * kFloat, kAll);
  });
}

TEST_P(KernelBytes, of_embedding) {
  with_kernels(GetParam(), gpu, [&]<class T>(Element<T>, GpuElementOps<T>& ops) {
    constexpr std::int64_t kBatch = 2, kLength = 32, kTokens = kBatch * kLength, kCount = kTokens * kCols,
                           kAll = kCount * kSize<T>, kSums = kCount * kFloat, kQuads = kCount / 4;
    std::vector<std::int32_t> values(kTokens);
    std::iota(values.begin(), values.end(), 0);  // all are different
    const std::int32_t* tokens = integers(values);
    T *x = array<T>(kCount), *table = array<T>(kCount), *positions = array<T>(kLength * kCols);
    ops.embedding(x, tokens, table, positions, kBatch, kLength, kCols, kTokens);
    // Each quad reads its token, and a warp has one.
    expect_moved("embedding", 2 * kAll + kQuads * 4, kAll,
                 {.loaded = 2 * kAll / kSector + kQuads / 32, .stored = kAll / kSector});
    ops.embedding_backward(array(kCount), array(kLength * kCols), tokens, x, kBatch, kLength, kCols);
    // Of each token: its own by 128 threads, those before it and those from it on; dx, and the row that is added to.
    constexpr std::int64_t kScanned = kTokens * (128 + kTokens);
    finish();
    const cuda_emu::KernelCounts& counts = machine.ledger().kernels.at("embedding_table");
    EXPECT_EQ(counts.loaded, 4 * kScanned + kAll + kSums);
    EXPECT_EQ(counts.stored, kSums);
    EXPECT_EQ(counts.stored_sectors, kSums / kSector);
    EXPECT_LE(counts.loaded_sectors, (kAll + kSums) / kSector + kTokens * (4 + 2 + kTokens / 8))
        << "the scan is not coalesced";
    constexpr std::int64_t kPositions = kLength * kCols * kFloat;
    expect_moved("embedding_positions", kAll + kPositions, kPositions);
  });
}

TEST_P(KernelBytes, of_token_losses) {
  with_kernels(GetParam(), gpu, [&]<class T>(Element<T>, GpuElementOps<T>& ops) {
    constexpr std::int64_t kVocab = 4096, kLossRows = 4, kThreads = 512, kWarps = kThreads / 32;
    constexpr std::int64_t kLogits = kVocab * kFloat, kGradients = kVocab * kSize<T>;
    float *logits = array(kLossRows * kVocab), *losses = array(kLossRows), *weights = array(kLossRows);
    const std::int32_t* targets = integers({0, 5, 4095, 17});
    ops.token_losses(losses, logits, targets, nullptr, kLossRows, kVocab);
    // Every thread reads the row's target and its logit: a sector each for every warp.
    expect_moved("token_losses", kLossRows * (kLogits + 2 * kThreads * 4), kLossRows * kFloat,
                 {.loaded = kLossRows * (kLogits / kSector + 2 * kWarps), .stored = kLossRows});
    machine.ledger().kernels.clear();
    ops.token_losses(losses, logits, targets, weights, kLossRows, kVocab);
    expect_moved(
        "token_losses", kLossRows * (2 * kLogits + 3 * kThreads * 4), kLossRows * (kGradients + kFloat),
        {.loaded = kLossRows * (2 * kLogits / kSector + 3 * kWarps), .stored = kLossRows * (kGradients / kSector + 1)});
  });
}

TEST_P(KernelBytes, of_attention) {
  with_kernels(GetParam(), gpu, [&]<class T>(Element<T>, GpuElementOps<T>& ops) {
    constexpr std::int64_t kT = 128, kD = 64, kHeads = 2, kTile = 64, kTiles = kT / kTile;
    constexpr AttentionSizes kSizes = {.batch = 1, .tokens = kT, .heads = kHeads, .kv_heads = 1, .head_size = kD};
    constexpr std::int64_t kPairs = kTiles * (kTiles + 1) / 2;  // of a tile of queries and one of keys that it sees
    constexpr std::int64_t kHead = kT * kD * kSize<T>, kSeen = 2 * kPairs * kTile * kD * kSize<T>;  // seen: k and v
    constexpr std::int64_t kValues = kT * kFloat;  // of a head's rows: lse, or delta
    T *qkv = array<T>(kT * (kHeads + 2) * kD), *dqkv = array<T>(kT * (kHeads + 2) * kD),
      *y = array<T>(kT * kHeads * kD), *dy = array<T>(kT * kHeads * kD);
    float* lse = array(kHeads * kT);
    constexpr bool kTensorCores = std::is_same_v<T, Bf16>;
    ops.attention(y, lse, qkv, kSizes, {});
    // lse: a store of a warp is of two rows, or of eight.
    expect_moved("attention", kHeads * (kHead + kSeen), kHeads * (kHead + kValues),
                 {.loaded = kHeads * (kHead + kSeen) / kSector,
                  .stored = kHeads * (kHead / kSector + kT / (kTensorCores ? 8 : 2))});
    ops.attention_backward(dqkv, qkv, y, lse, dy, kSizes, {});
    expect_moved("attention_delta", kHeads * 2 * kHead, kHeads * kValues,
                 {.loaded = kHeads * 2 * kHead / kSector, .stored = kHeads * kT});  // a warp has one row
    // On tensor cores each of four threads reads the values of the rows that they share.
    expect_moved("attention_dq", kHeads * (2 * kHead + (kTensorCores ? 4 : 1) * 2 * kValues + kSeen), kHeads * kHead,
                 {.loaded = kHeads * (2 * kHead + 2 * kValues + kSeen) / kSector, .stored = kHeads * kHead / kSector});
    expect_moved("attention_dkv", 2 * kHead + kHeads * (kSeen + 2 * kPairs * kTile * kFloat), 2 * kHead);
  });
}

TEST_F(Fp32KernelBytes, of_optimizers) {
  constexpr std::int64_t kAll = kN * kFloat;
  float *p = array(kN), *m = array(kN), *v = array(kN), *g = array(kN);
  gpu.adamw(p, m, v, g, kN, {});
  expect_moved("adamw", 4 * kAll, 3 * kAll);
  gpu.sgd(p, m, g, kN, 1, 0, 0.1F, 0.9F);
  expect_moved("sgd", 3 * kAll, 2 * kAll);
  machine.ledger().kernels.clear();
  gpu.sgd(p, nullptr, g, kN, 1, 0, 0.1F, 0);
  expect_moved("sgd", 2 * kAll, kAll);
  const std::span<const float> arrays[] = {{g, static_cast<std::size_t>(kN)}};
  static_cast<void>(gpu.sums_of_squares(arrays, [] {}));
  constexpr std::int64_t kBlocks = kN / 1024;  // a double each
  expect_moved("sum_of_squares", kAll, 8 * kBlocks, {.loaded = kAll / kSector, .stored = kBlocks});
  static_cast<void>(gpu.count_nonfinite(g, kN));
  expect_moved("count_nonfinite", kAll, 8 * kBlocks, {.loaded = kAll / kSector, .stored = kBlocks});
}

TEST_F(Fp32KernelBytes, of_rounding) {
  array<Bf16>(kN);
  expect_moved("round", kN * kFloat, kN * kSize<Bf16>);
}

}  // namespace
}  // namespace regather::testing
