// What each kernel moves between global memory and the threads: the bytes of the formula at the top of its file, in
// whole sectors of 32 bytes. Sizes are multiples of the tiles, memory is aligned.
#include <gtest/gtest.h>

#include <numeric>

#include "tensor/cuda/device.h"
#include "tensor/ops/gpu_ops.h"
#include "tests/cuda_emu/machine.h"
#include "tests/tensor/cuda/on_device.h"

namespace regather::testing {
namespace {

constexpr std::int64_t kN = 4096, kRows = 128, kCols = 256;

class KernelBytes : public ::testing::Test {
 protected:
  KernelBytes() : device(0, 0, 1 << 20), gpu(*device.gpu()) {}
  ~KernelBytes() override { EXPECT_EQ(machine.findings(), std::vector<std::string>{}); }

  float* array(std::int64_t n) {
    buffers.push_back(on_device(device, numbers(n)));
    return buffers.back().data<float>();
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
  // In words of 4 bytes. Sectors: as many as the words fill, unless others are given.
  void expect_moved(const char* kernel, std::int64_t loaded, std::int64_t stored) {
    expect_moved(kernel, loaded, stored, {loaded / 8, stored / 8});
  }
  void expect_moved(const char* kernel, std::int64_t loaded, std::int64_t stored, Sectors sectors) {
    finish();
    const cuda_emu::KernelCounts& counts = machine.ledger().kernels.at(kernel);
    EXPECT_EQ(counts.launches, 1) << kernel;
    EXPECT_EQ(counts.loaded, 4 * loaded) << kernel;
    EXPECT_EQ(counts.stored, 4 * stored) << kernel;
    EXPECT_EQ(counts.loaded_sectors, sectors.loaded) << kernel << ": loads are not coalesced";
    EXPECT_EQ(counts.stored_sectors, sectors.stored) << kernel << ": stores are not coalesced";
  }

  cuda_emu::Machine machine{{.devices = 1, .guarded = false}};
  CudaDevice device;
  GpuOps& gpu;
  std::vector<Buffer> buffers;
};

TEST_F(KernelBytes, of_elementwise_operations) {
  float *x = array(kN), *y = array(kN), *z = array(kN), *u = array(kN), *v = array(kN);
  gpu.add(z, x, y, kN);
  expect_moved("add", 2 * kN, kN);
  gpu.gelu(z, x, kN);
  expect_moved("gelu", kN, kN);
  gpu.gelu_backward(z, x, y, kN);
  expect_moved("gelu_backward", 2 * kN, kN);
  gpu.swiglu(z, x, y, kN);
  expect_moved("swiglu", 2 * kN, kN);
  gpu.swiglu_backward(u, v, x, y, z, kN);
  expect_moved("swiglu_backward", 3 * kN, 2 * kN);
  gpu.dropout(z, x, 4, kN / 4, {.threshold = 1U << 30, .scale = 2, .key = {.seed = 1}});
  expect_moved("dropout", kN, kN);
}

TEST_F(KernelBytes, of_rows_and_columns) {
  float *x = array(kRows * kCols), *row = array(kCols);
  gpu.fill_rows(x, row, kRows, kCols);
  expect_moved("fill_rows", kRows * kCols, kRows * kCols);
  gpu.add_column_sums(row, x, kRows, kCols);
  constexpr std::int64_t kChunks = kRows / 64;
  expect_moved("column_sums", kRows * kCols, kChunks * kCols);
  expect_moved("add_partial_sums", (kChunks + 1) * kCols, kCols);
}

TEST_F(KernelBytes, of_norms) {
  constexpr std::int64_t kAll = kRows * kCols;
  float *x = array(kAll), *y = array(kAll), *dx = array(kAll), *gain = array(kCols), *bias = array(kCols);
  gpu.layer_norm(y, x, gain, bias, kRows, kCols, 1e-5F);
  expect_moved("layer_norm", kAll + 2 * kAll, kAll);  // gain and bias of every row come from the cache
  gpu.rms_norm(y, x, gain, kRows, kCols, 1e-5F);
  expect_moved("rms_norm", kAll + kAll, kAll);
  float *dgain = array(kCols), *dbias = array(kCols);
  gpu.layer_norm_backward(dx, dgain, dbias, x, gain, y, kRows, kCols, 1e-5F);
  expect_moved("layer_norm_backward", 2 * kAll + 2 * kAll, kAll + 2 * kAll);  // a chunk is one row: 128 < 256
  gpu.rms_norm_backward(dx, dgain, x, gain, y, kRows, kCols, 1e-5F);
  expect_moved("rms_norm_backward", 2 * kAll + 2 * kAll, kAll + kAll);
}

TEST_F(KernelBytes, of_rope) {
  constexpr AttentionSizes kSizes = {.batch = 2, .tokens = 8, .heads = 2, .kv_heads = 1, .head_size = 64};
  constexpr std::int64_t kAll = 2 * 8 * 4 * 64, kPairs = 2 * 8 * 3 * 32;
  gpu.rope(array(kAll), array(kAll), kSizes, 10000, 1);
  expect_moved("rotations", 0, 2 * 8 * 32);
  expect_moved("rope", kAll + 2 * kPairs, kAll);
}

TEST_F(KernelBytes, of_embedding) {
  constexpr std::int64_t kBatch = 2, kLength = 32, kTokens = kBatch * kLength, kAll = kTokens * kCols;
  std::vector<std::int32_t> values(kTokens);
  std::iota(values.begin(), values.end(), 0);  // all are different
  const std::int32_t* tokens = integers(values);
  float *x = array(kAll), *table = array(kAll), *positions = array(kLength * kCols);
  gpu.embedding(x, tokens, table, positions, kBatch, kLength, kCols, kTokens);
  const std::int64_t quads = kAll / 4;  // each reads its token, and a warp has one
  expect_moved("embedding", 2 * kAll + quads, kAll, {.loaded = 2 * kAll / 8 + quads / 32, .stored = kAll / 8});
  gpu.embedding_backward(table, positions, tokens, x, kBatch, kLength, kCols);
  // Of each token: its own by 128 threads, those before it and those from it on; dx, and the row that is added to.
  const std::int64_t scanned = kTokens * (128 + kTokens);
  finish();
  const cuda_emu::KernelCounts& counts = machine.ledger().kernels.at("embedding_table");
  EXPECT_EQ(counts.loaded, 4 * (scanned + 2 * kAll));
  EXPECT_EQ(counts.stored, 4 * kAll);
  EXPECT_EQ(counts.stored_sectors, kAll / 8);
  EXPECT_LE(counts.loaded_sectors, 2 * kAll / 8 + kTokens * (4 + 2 + kTokens / 8)) << "the scan is not coalesced";
  expect_moved("embedding_positions", kAll + kLength * kCols, kLength * kCols);
}

TEST_F(KernelBytes, of_token_losses) {
  constexpr std::int64_t kVocab = 4096, kLossRows = 4, kThreads = 512, kWarps = kThreads / 32;
  float *logits = array(kLossRows * kVocab), *losses = array(kLossRows), *weights = array(kLossRows);
  const std::int32_t* targets = integers({0, 5, 4095, 17});
  gpu.token_losses(losses, logits, targets, nullptr, kLossRows, kVocab);
  // Every thread reads the row's target and its logit: a sector each for every warp.
  expect_moved("token_losses", kLossRows * (kVocab + 2 * kThreads), kLossRows,
               {.loaded = kLossRows * (kVocab / 8 + 2 * kWarps), .stored = kLossRows});
  machine.ledger().kernels.clear();
  gpu.token_losses(losses, logits, targets, weights, kLossRows, kVocab);
  expect_moved("token_losses", kLossRows * (2 * kVocab + 3 * kThreads), kLossRows * (kVocab + 1),
               {.loaded = kLossRows * (2 * kVocab / 8 + 3 * kWarps), .stored = kLossRows * (kVocab / 8 + 1)});
}

TEST_F(KernelBytes, of_attention) {
  constexpr std::int64_t kT = 128, kD = 64, kHeads = 2, kTile = 64, kTiles = kT / kTile;
  constexpr AttentionSizes kSizes = {.batch = 1, .tokens = kT, .heads = kHeads, .kv_heads = 1, .head_size = kD};
  constexpr std::int64_t kPairs = kTiles * (kTiles + 1) / 2;  // of a tile of queries and one of keys that it sees
  float *qkv = array(kT * (kHeads + 2) * kD), *dqkv = array(kT * (kHeads + 2) * kD), *y = array(kT * kHeads * kD),
        *dy = array(kT * kHeads * kD), *lse = array(kHeads * kT);
  gpu.attention(y, lse, qkv, kSizes, {});
  constexpr std::int64_t kHead = kT * kD, kSeen = 2 * kPairs * kTile * kD;  // k and v
  // lse: a warp has two rows, and so two words of a sector.
  expect_moved("attention", kHeads * (kHead + kSeen), kHeads * (kHead + kT),
               {.loaded = kHeads * (kHead + kSeen) / 8, .stored = kHeads * (kHead / 8 + kT / 2)});
  gpu.attention_backward(dqkv, qkv, y, lse, dy, kSizes, {});
  expect_moved("attention_delta", kHeads * 2 * kHead, kHeads * kT,
               {.loaded = kHeads * 2 * kHead / 8, .stored = kHeads * kT});  // a warp has one row
  expect_moved("attention_dq", kHeads * (2 * kHead + 2 * kT + kSeen), kHeads * kHead);
  expect_moved("attention_dkv", 2 * kHead + kHeads * (kSeen + 2 * kPairs * kTile), 2 * kHead);
}

TEST_F(KernelBytes, of_optimizers) {
  float *p = array(kN), *m = array(kN), *v = array(kN), *g = array(kN);
  gpu.adamw(p, m, v, g, kN, {});
  expect_moved("adamw", 4 * kN, 3 * kN);
  gpu.sgd(p, m, g, kN, 1, 0, 0.1F, 0.9F);
  expect_moved("sgd", 3 * kN, 2 * kN);
  machine.ledger().kernels.clear();
  gpu.sgd(p, nullptr, g, kN, 1, 0, 0.1F, 0);
  expect_moved("sgd", 2 * kN, kN);
  static_cast<void>(gpu.sum_of_squares(g, kN));
  constexpr std::int64_t kBlocks = kN / 1024;  // a double each
  expect_moved("sum_of_squares", kN, 2 * kBlocks, {.loaded = kN / 8, .stored = kBlocks});
  static_cast<void>(gpu.count_nonfinite(g, kN));
  expect_moved("count_nonfinite", kN, 2 * kBlocks, {.loaded = kN / 8, .stored = kBlocks});
}

}  // namespace
}  // namespace regather::testing
