// Training steps on CUDA devices, of one rank and of several: the same bits under every checkpoint policy and every
// order in which streams run, the CPU's numbers at as many ranks within a bound, and the communication that closed
// forms say, by NCCL's own count.
#include "ckpt/stack_runner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "dist/optimizer.h"
#include "model/registry.h"
#include "tests/cuda_emu/seeds.h"
#include "tests/dist/cuda_ranks.h"
#include "tests/launcher/expected_volume.h"

namespace regather::testing {
namespace {

enum class Memory { OneRank, Nccl, Staged };  // what moves it; staged: ranks share a GPU

struct TrainSetup {
  std::string model = "gpt2";
  PolicyOptions policy{.policy = "none"};
  int slots = 2, prefetch = 1;
  Strategy strategy = Strategy::Full;
  bool audit = false;
  int ranks = 1;
  Memory memory = Memory::OneRank;
  AccumulationOrder order = AccumulationOrder::BatchMajor;
  ReduceWhen reduce = ReduceWhen::EachMicroBatch;
  int layers = 3;
  DType compute = DType::F32;
};

// Of one rank.
struct Trained {
  std::vector<double> losses, norms;  // by step
  std::vector<float> gradients;       // of the last step
  std::vector<float> parameters;      // after it
  bool operator==(const Trained&) const = default;
};
using RanksTrained = std::vector<Trained>;

constexpr std::int64_t kBatch = 2, kTokens = 9, kVocab = 37;
constexpr int kMicroBatches = 2, kSteps = 2;

Model model_of(const TrainSetup& setup) {
  return make_model({.type = setup.model,
                     .layers = setup.layers,
                     .hidden = 16,
                     .heads = 2,
                     .vocab = kVocab,
                     .max_sequence = kTokens,
                     .dropout = setup.model == "gpt2" ? 0.1F : 0.0F,
                     .tie_embeddings = setup.model == "gpt2",
                     .init_std = 0.2F});
}

Tensor tokens_of(Device& device, int step, int sequence, int shift) {
  std::vector<std::int32_t> values;
  for (std::int64_t i = 0; i < kBatch * kTokens; ++i)
    values.push_back(static_cast<std::int32_t>((i + shift + 5 * sequence + 11 * step) * (i + shift + 3) % kVocab));
  Tensor t(device.memory, {kBatch, kTokens}, Tag::Workspace, DType::I32);
  device.write(Stream::Compute, t.fresh<void>(), values.data(), t.bytes());
  return t;
}

std::vector<float> host_copy(Device& device, const float* from, std::int64_t n) {
  std::vector<float> copy(static_cast<std::size_t>(n));
  device.read(Stream::Compute, copy.data(), from, n * static_cast<std::int64_t>(sizeof(float)));
  return copy;
}

// What one rank does.
Trained train(Device& device, Communicator& comm, TrainSetup setup) {
  const Model model = model_of(setup);
  setup.policy.marks = marks_of(model);
  setup.policy.costly = costly_marks_of(model);
  comm.use_memory_of(device);
  if (comm.size() > 1) device.between_ops = [&comm] { comm.progress(); };
  StackRunner stack(
      model, device, comm,
      {.checkpoint = make_checkpoint_plan(setup.policy, setup.layers),
       .plan = {.micro_batches = kMicroBatches, .slots = setup.slots, .order = setup.order, .reduce = setup.reduce},
       .strategy = setup.strategy,
       .prefetch = setup.prefetch,
       .compute = setup.compute,
       .audit_every = setup.audit ? 1 : 0});
  ShardedOptimizer optimizer(stack.units(), device, {});
  const std::vector<float> weight(kBatch * kTokens,
                                  1.0F / static_cast<float>(comm.size() * kMicroBatches * kBatch * kTokens));
  Trained result;
  for (int step = 0; step < kSteps; ++step) {
    comm.reset_ledger();
    std::vector<MicroBatch> batches;
    for (int m = 0; m < kMicroBatches; ++m) {
      Tensor weights(device.memory, {kBatch, kTokens}, Tag::Workspace);
      device.write(Stream::Compute, weights.fresh<void>(), weight.data(), weights.bytes());
      const int index = m * comm.size() + comm.rank();
      batches.push_back({tokens_of(device, step, index, 0), tokens_of(device, step, index, 1), weights,
                         static_cast<std::uint64_t>(index * kBatch)});
    }
    double loss = 0;
    stack.step(batches, static_cast<std::uint64_t>(step), [&](int, const Tensor& losses) {
      for (const float l : host_copy(device, losses.data(), losses.numel())) loss += static_cast<double>(l);
    });
    const double squares = optimizer.gradient_squares();
    std::vector<double> learns = optimizer.nonzero_gradients();
    result.gradients.clear();
    for (const auto& unit : stack.units())
      for (const ShardUnit::OwnedPiece& piece : unit->normed())
        std::ranges::copy(host_copy(device, piece.gradient, piece.size), std::back_inserter(result.gradients));
    optimizer.step(1e-2, 0.5, step + 1);
    for (const auto& unit : stack.units()) unit->parameters_changed();
    for (const auto& unit : stack.units()) unit->finish_refresh();
    EXPECT_EQ(differences(stack.expected(), comm.ledger().entries()), std::vector<std::string>{});

    std::vector<double> sums = {loss, squares};
    std::ranges::copy(learns, std::back_inserter(sums));
    comm.all_reduce(sums, {.unit = "scalars", .pass = Pass::Step});
    result.losses.push_back(sums[0]);
    result.norms.push_back(std::sqrt(sums[1]));
    EXPECT_GE(*std::min_element(sums.begin() + 2, sums.end()), 1) << "a parameter that learns nothing";
  }
  for (const auto& unit : stack.units())
    for (const ShardUnit::OwnedPiece& piece : unit->normed())
      std::ranges::copy(host_copy(device, piece.value, piece.size), std::back_inserter(result.parameters));
  device.between_ops = {};
  return result;
}

RanksTrained train_on_cpu(const TrainSetup& setup) {
  RanksTrained results(static_cast<std::size_t>(setup.ranks));
  run_ranks(setup.ranks, {}, [&](Communicator& comm) {
    CpuDevice device;
    results[static_cast<std::size_t>(comm.rank())] = train(device, comm, setup);
  });
  return results;
}

// NCCL's calls and bytes in a run, over all ranks, from closed forms.
std::map<std::string, cuda_emu::Counts> expected_collectives(const TrainSetup& setup) {
  const Model model = model_of(setup);
  const std::int64_t L = setup.layers, W = setup.ranks, D = setup.slots;
  const std::int64_t M = setup.order == AccumulationOrder::LayerMajor ? 1 : kMicroBatches;
  const std::int64_t K = (L + 1) / 2;  // of two segments
  const std::int64_t block_gathers =
      setup.policy.policy == "segments" && D < K ? segment_gathers(L, M, D, 2, K) : batch_major_gathers(L, M, D);
  std::map<std::string, cuda_emu::Counts> all;
  const auto count = [&](const std::string& name, std::int64_t times, std::int64_t shard, std::int64_t ways) {
    const DType type = name == "AllGather" ? setup.compute : DType::F32;
    cuda_emu::Counts& counts = all[fmt::format("{} of {}", name, name_of(type))];
    counts.calls += kSteps * W * times;
    counts.bytes += kSteps * W * times * ways * (W - 1) * shard * static_cast<std::int64_t>(size_of(type));
  };
  for (std::size_t u = 0; u < model.units.size(); ++u) {
    std::int64_t elements = 0;
    for (const ParamInfo& p : model.units[u].params) elements += p.shape.numel();
    const std::int64_t shard = (elements + W - 1) / W;
    const bool block =
        std::ranges::any_of(model.blocks, [&](const Part& b) { return b.units[0] == static_cast<int>(u); });
    // A tied table is used by the lookup and by the head.
    const std::int64_t uses = model.units[u].name == "wte" && setup.model == "gpt2" ? 2 : 1;
    const bool once = setup.reduce == ReduceWhen::Once && setup.order == AccumulationOrder::BatchMajor;
    const std::int64_t reductions = once ? 1 : uses * M;
    if (setup.strategy == Strategy::None) {
      count("AllReduce", reductions, shard, 2);
      continue;
    }
    count("ReduceScatter", reductions, shard, 1);
    if (setup.strategy != Strategy::Full)
      count("AllGather", 1, shard, 1);
    else if (!block)
      count("AllGather", uses * M, shard, 1);
    else if (u == static_cast<std::size_t>(model.blocks[0].units[0]))
      count("AllGather", block_gathers, shard, 1);  // of all blocks, which are alike
  }
  return all;
}

// Copies on the device in a run, over all ranks: this rank's part into each slot, and, once a step, the vectors of a
// block that is evicted and used again.
std::int64_t expected_device_copies(TrainSetup setup) {
  if (setup.strategy != Strategy::Full) return 0;
  const Model model = model_of(setup);
  setup.policy.marks = marks_of(model);
  setup.policy.costly = costly_marks_of(model);
  PartUnits units{.blocks = {}, .embedding = model.embedding.units, .head = model.head.units};
  for (const Part& block : model.blocks) units.blocks.push_back(block.units);
  const StepPlan plan = make_step_plan(units, static_cast<int>(model.units.size()),
                                       {.micro_batches = kMicroBatches,
                                        .segments = make_checkpoint_plan(setup.policy, setup.layers).segments,
                                        .slots = setup.slots,
                                        .order = setup.order,
                                        .reduce = setup.reduce});
  std::vector<int> gathers(model.units.size());
  for (const StepPlan::Entry& entry : plan.entries)
    for (const int unit : entry.gathers) ++gathers[static_cast<std::size_t>(unit)];
  std::int64_t copies = 0;
  for (std::size_t u = 0; u < gathers.size(); ++u) {
    if (setup.compute == DType::F32) copies += gathers[u];  // others are rounded into their slot
    const bool block = std::ranges::any_of(units.blocks, [&](const auto& b) { return b[0] == static_cast<int>(u); });
    if (block && gathers[u] > 1)
      copies += std::ranges::count_if(model.units[u].params, [](const ParamInfo& p) { return p.shape.ndim() == 1; });
  }
  return kSteps * setup.ranks * copies;
}

RanksTrained train_on_cuda(const TrainSetup& setup, std::uint64_t seed = 1) {
  const bool nccl = setup.memory == Memory::Nccl;
  cuda_emu::Machine machine(
      {.seed = seed, .devices = nccl ? setup.ranks : 1, .blocks_apart = 0, .guarded = false, .late_collectives = true});
  RanksTrained results(static_cast<std::size_t>(setup.ranks));
  if (setup.memory == Memory::OneRank) {
    CudaDevice device(0, 0, 64 << 10);
    const auto comm = make_single_communicator({});
    results[0] = train(device, *comm, setup);
  } else {
    const auto make = [&](std::unique_ptr<Transport> messages, int rank, int size) {
      return nccl ? make_nccl_transport(std::move(messages), rank, size)
                  : make_staged_transport(std::move(messages), rank, size, std::int64_t{2} << 10);
    };
    const auto body = [&](Communicator& comm, CudaDevice& device) {
      results[static_cast<std::size_t>(comm.rank())] = train(device, comm, setup);
    };
    run_cuda_ranks(machine, setup.ranks, {}, make, body, nccl ? Gpus::OneEach : Gpus::OneForAll);
  }
  EXPECT_EQ(machine.findings(), std::vector<std::string>{});
  for (int d = 0; d < (nccl ? setup.ranks : 1); ++d)
    EXPECT_EQ(machine.used_bytes(d), 0U) << "everything was given back";
  EXPECT_EQ(machine.pinned_bytes(), 0U);
  EXPECT_EQ(machine.communicators(), 0);
  EXPECT_EQ(machine.ledger().copies["device to device"].calls, expected_device_copies(setup));
  const auto expected = nccl ? expected_collectives(setup) : std::map<std::string, cuda_emu::Counts>{};
  EXPECT_EQ(machine.ledger().collectives.size(), expected.size());
  for (const auto& [name, counts] : expected) {
    EXPECT_EQ(machine.ledger().collectives[name].calls, counts.calls) << name;
    EXPECT_EQ(machine.ledger().collectives[name].bytes, counts.bytes) << name;
  }
  return results;
}

PolicyOptions offloading(PolicyOptions options) {
  options.offload.names = {"all"};
  return options;
}

struct Ranks {
  const char *name, *model;
  int ranks;
  Memory memory;
  DType compute = DType::F32;
  TrainSetup setup() const { return {.model = model, .ranks = ranks, .memory = memory, .compute = compute}; }
};
void PrintTo(const Ranks& ranks, std::ostream* out) { *out << ranks.name; }

class CudaTraining : public ::testing::TestWithParam<Ranks> {};

TEST_P(CudaTraining, gives_the_same_bits_under_every_policy_and_order_of_its_streams) {
  TrainSetup setup = GetParam().setup();
  const RanksTrained expected = train_on_cuda(setup);
  std::vector<PolicyOptions> policies = {{.policy = "full"},
                                         {.policy = "selective"},
                                         offloading({.policy = "none"}),
                                         offloading({.policy = "selective"}),
                                         {.policy = "none"},
                                         {.policy = "full", .order = Order::Ahead},
                                         {.policy = "every_n_layers"},
                                         {.policy = "segments", .segments = 2}};
  // Whose streams do different things; where a step takes long on the emulator, the others are left to one that does
  // not.
  if (cuda_emu::testing::kSeesRaces || setup.ranks > 2 || setup.compute == DType::BF16) policies.resize(4);
  std::uint64_t seed = 2;
  for (int round = 0; round < cuda_emu::testing::seeds(1); ++round, ++seed)  // one more: another seed's way a policy
    for (const PolicyOptions& policy : policies) {
      setup.policy = policy;
      setup.audit = seed % 4 < 2;
      setup.slots = seed % 2 == 0 || policy.policy == "segments" ? 2 : 1;
      setup.prefetch = setup.slots - 1;
      EXPECT_TRUE(train_on_cuda(setup, seed) == expected) << policy.policy << ", seed " << seed;
      ++seed;
    }
}

TEST_P(CudaTraining, gives_the_same_bits_under_every_strategy) {
  TrainSetup setup = GetParam().setup();
  const RanksTrained expected = train_on_cuda(setup);
  for (int seed = 1; seed <= 3 * cuda_emu::testing::seeds(1); ++seed) {
    constexpr std::array kStrategies = {Strategy::Gradients, Strategy::Optimizer, Strategy::None};
    setup.strategy = kStrategies[static_cast<std::size_t>(seed % 3)];
    EXPECT_TRUE(train_on_cuda(setup, static_cast<std::uint64_t>(seed)) == expected) << "seed " << seed;
  }
}

TEST_P(CudaTraining, follows_the_cpu) {
  for (const AccumulationOrder order : {AccumulationOrder::BatchMajor, AccumulationOrder::LayerMajor}) {
    TrainSetup setup = GetParam().setup();
    setup.order = order;
    setup.policy = {.policy = "full"};
    const RanksTrained cpu = train_on_cpu(setup), cuda = train_on_cuda(setup);
    const bool fp32 = setup.compute == DType::F32;
    const double bound = fp32 ? 1e-4 : 1e-2;
    for (int step = 0; step < kSteps; ++step) {
      const auto s = static_cast<std::size_t>(step);
      EXPECT_NEAR(cuda[0].losses[s], cpu[0].losses[s], bound * cpu[0].losses[s]);
      EXPECT_NEAR(cuda[0].norms[s], cpu[0].norms[s], bound * cpu[0].norms[s]);
    }
    double largest = 0, squares = 0, difference = 0;
    for (std::size_t r = 0; r < cpu.size(); ++r) {
      ASSERT_EQ(cuda[r].gradients.size(), cpu[r].gradients.size());
      for (std::size_t i = 0; i < cpu[r].gradients.size(); ++i) {
        const double g = cpu[r].gradients[i], d = cuda[r].gradients[i] - g;
        largest = std::max(largest, std::abs(g));
        squares += g * g;
        difference += d * d;
      }
    }
    // The second step's, from weights that Adam has moved by the signs of gradients: of those, rounding decides some.
    EXPECT_LT(std::sqrt(difference), (fp32 ? bound : 0.1) * std::sqrt(squares));
    for (std::size_t r = 0; fp32 && r < cpu.size(); ++r)
      for (std::size_t i = 0; i < cpu[r].gradients.size(); ++i)
        ASSERT_NEAR(cuda[r].gradients[i], cpu[r].gradients[i], bound * largest) << "rank " << r << " element " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaTraining,
                         ::testing::Values(Ranks{"gpt2_on_one", "gpt2", 1, Memory::OneRank},
                                           Ranks{"llama_on_one", "llama", 1, Memory::OneRank},
                                           Ranks{"gpt2_on_two", "gpt2", 2, Memory::Nccl},
                                           Ranks{"llama_on_four", "llama", 4, Memory::Nccl},
                                           Ranks{"gpt2_on_one_in_bf16", "gpt2", 1, Memory::OneRank, DType::BF16},
                                           Ranks{"llama_on_two_in_bf16", "llama", 2, Memory::Nccl, DType::BF16}),
                         [](const auto& ranks) { return std::string(ranks.param.name); });

TEST(CudaTraining, communicates_what_the_closed_forms_say) {
  for (const AccumulationOrder order : {AccumulationOrder::BatchMajor, AccumulationOrder::LayerMajor})
    for (const int slots : {1, 3}) {
      TrainSetup setup{.policy = {.policy = "segments", .segments = 2},
                       .slots = slots,
                       .prefetch = slots > 1 ? 1 : 0,
                       .ranks = 2,
                       .memory = Memory::Nccl,
                       .order = order,
                       .reduce = slots == 3 ? ReduceWhen::Once : ReduceWhen::EachMicroBatch,
                       .layers = 4};
      train_on_cuda(setup);  // compares
    }
}

TEST(CudaTraining, gives_the_bits_of_the_hosts_sums_where_ranks_share_a_gpu) {
  const RanksTrained nccl =
      train_on_cuda({.ranks = 2, .memory = Memory::Nccl});  // the emulator's adds in rank order, too
  TrainSetup staged{.ranks = 2, .memory = Memory::Staged};
  std::uint64_t seed = 1;
  for (const PolicyOptions& policy : {PolicyOptions{.policy = "none"}, offloading({.policy = "selective"})})
    for (const Strategy strategy : {Strategy::Full, Strategy::None}) {
      staged.policy = policy;
      staged.strategy = strategy;
      staged.slots = seed % 2 == 0 ? 2 : 1;
      EXPECT_TRUE(train_on_cuda(staged, seed++) == nccl)
          << policy.policy << ", strategy " << static_cast<int>(strategy);
    }
}

TEST(CudaTraining, is_refused_by_a_backend_of_the_hosts_memory) {
  const cuda_emu::Machine machine({.devices = 1, .blocks_apart = 0, .guarded = false});
  CudaDevice device(0, 0, 64 << 10);
  EXPECT_THROW(make_dry_communicator(0, 2)->use_memory_of(device), UsageError);
}

}  // namespace
}  // namespace regather::testing
