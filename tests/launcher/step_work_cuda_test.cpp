// What a training step enqueues on GPUs: the kernels, products, copies and fills that its plan lists, and no other. The
// list comes from a step without storage: operations as its trace has them, in each pass, times what one of them
// launches; gathers, reductions, offloaded values; the optimizer's pieces.
#include <gtest/gtest.h>

#include "tensor/ops/linear_cross_entropy.h"
#include "tests/dist/cuda_ranks.h"
#include "tests/launcher/training_run.h"

namespace regather::testing {
namespace {

using Counts = std::map<std::string, std::int64_t>;  // by kernel, "product", "device to host", ..., "set"

constexpr const char *kProduct = "product", *kOnDevice = "device to device", *kToHost = "device to host",
                     *kToDevice = "host to device", *kFill = "set";

// Of one operation with all of its gradients. A rerun launches what the run did.
using Launches = std::map<std::string, std::vector<std::string>, std::less<>>;
Launches launches_of(const RunSetup& s) {
  Launches all = {{"run add", {"add"}},
                  {"backward add", {}},  // passes its gradient on
                  {"run attention", {"attention"}},
                  {"backward attention", {"attention_delta", "attention_dq", "attention_dkv"}},
                  {"run linear_cross_entropy", {}}};  // all in backward, chunk by chunk
  const std::int64_t rows = s.micro_batch * s.sequence;
  const ValueType x = {{s.micro_batch, s.sequence, s.model.hidden}, s.compute};
  const std::int64_t chunk = cross_entropy_chunk(DeviceKind::Cuda, x, s.model.vocab);
  for (std::int64_t first = 0; first < rows; first += chunk)
    for (const char* name : {kProduct, "token_losses", kProduct, kProduct})
      all["backward linear_cross_entropy"].emplace_back(name);
  if (s.model.type == "gpt2") {
    all["run embedding"] = {"embedding"};
    all["backward embedding"] = {"embedding_table", "embedding_positions"};
    all["run dropout"] = all["backward dropout"] = {"dropout"};
    all["run layer_norm"] = {"layer_norm"};
    all["backward layer_norm"] = {"layer_norm_backward", "add_partial_sums", "add_partial_sums"};
    all["run linear"] = {kProduct};  // its epilogue adds the bias
    all["backward linear"] = {kProduct, kProduct, "column_sums", "add_partial_sums"};
    all["run gelu"] = {"gelu"};
    all["backward gelu"] = {"gelu_backward"};
  } else {
    all["run embedding"] = {"embedding"};
    all["backward embedding"] = {"embedding_table"};
    all["run rms_norm"] = {"rms_norm"};
    all["backward rms_norm"] = {"rms_norm_backward", "add_partial_sums"};
    all["run linear"] = {kProduct};
    all["backward linear"] = {kProduct, kProduct};
    all["run rope"] = all["backward rope"] = {"rotations", "rope"};
    all["run swiglu"] = {"swiglu"};
    all["backward swiglu"] = {"swiglu_backward"};
  }
  return all;
}
// Values of a block that several operations read, whose gradients are added up: x and what is between attention and
// MLP; in a Llama the norm that gate and up read, too.
std::int64_t sums_of_gradients(const RunSetup& s) { return s.model.type == "gpt2" ? 2 : 3; }

class Listed {
 public:
  Listed(const RunSetup& s, const Model& model, int rank) : setup_(s), launches_(launches_of(s)) {
    CpuDevice device(Allocator::Mode::Meta);
    const auto comm = make_dry_communicator(rank, s.world);
    Trainer trainer(model, device, *comm, trainer_options(s));
    trainer.trace().keep_lines = true;
    std::vector<Batch> batches;
    for (int m = 0; m < s.plan.micro_batches; ++m) batches.push_back(make_batch(device, s, rank, s.world, 0, m));
    trainer.step(batches);
    for (const std::string& line : trainer.trace().lines) add_line(line);
    for (const StepPlan::Entry& entry : trainer.stack().plan().entries)
      if (entry.action.pass == Pass::Backward && entry.action.part >= 0) counts_["add"] += sums_of_gradients(s);
    for (const auto& unit : trainer.stack().units()) {
      counts_["adamw"] += std::ssize(unit->updated());
      for (const char* name : {"sum_of_squares", "add_totals"}) counts_[name] += std::ssize(unit->normed());
      counts_[kFill] += 1;                                               // of the sum of gradients
      if (unit->ledger_name() == "block" && gathers_[unit->name()] > 1)  // that goes and comes back leaves its vectors
        counts_[kOnDevice] += std::ranges::count_if(unit->table(), [](const auto& p) { return p.shape.ndim() == 1; });
    }
    counts_[kToDevice] += 1;                       // the weights of losses
    counts_[kToHost] += 2 * s.plan.micro_batches;  // losses, each with what operations found wrong
    counts_[kToHost] += 1;                         // all sums of squares
    std::erase_if(counts_, [](const auto& entry) { return entry.second == 0; });
  }
  const Counts& counts() const { return counts_; }

 private:
  void add_line(const std::string& line) {
    const std::string verb = line.substr(0, line.find(' ')), rest = line.substr(verb.size() + 1);
    if (verb == "gather") {
      ++gathers_[rest];
      ++counts_[setup_.compute == DType::F32 ? kOnDevice : "round"];  // this rank's part into the slot
    } else if (verb == "reduce") {
      ++counts_[kFill];  // of what backward adds to
      ++counts_["add"];  // the reduced part to this rank's sum
    } else if (verb == "store") {
      ++counts_[kToHost];
    } else if (verb == "fetch") {
      ++counts_[kToDevice];
    } else if (verb != "wait") {
      for (const std::string& name : launches_.at((verb == "rerun" ? "run " : verb + " ") + rest)) ++counts_[name];
    }
  }

  const RunSetup& setup_;
  Launches launches_;
  Counts counts_;
  std::map<std::string, int> gathers_;  // by unit
};

void drain(Device& device) {
  for (const Stream stream : {Stream::Compute, Stream::Gather, Stream::Reduce, Stream::ToHost, Stream::ToDevice})
    device.record(stream).wait();
}

// Of the first step, over all ranks.
Counts enqueued(const RunSetup& s, const Model& model) {
  cuda_emu::Machine machine({.devices = s.world, .blocks_apart = 0, .guarded = false});
  cuda_emu::Ledger ledger;
  const auto on_all_ranks = [](Communicator& comm, CudaDevice& device, const auto& f) {
    drain(device);
    comm.barrier({"scalars", Pass::Step});
    if (comm.rank() == 0) f();
    comm.barrier({"scalars", Pass::Step});
  };
  const auto body = [&](Communicator& comm, CudaDevice& device) {
    comm.use_memory_of(device);
    Trainer trainer(model, device, comm, trainer_options(s));
    std::vector<Batch> batches;
    for (int m = 0; m < s.plan.micro_batches; ++m) batches.push_back(make_batch(device, s, comm.rank(), s.world, 0, m));
    on_all_ranks(comm, device, [&] { machine.ledger() = {}; });
    trainer.step(batches);
    on_all_ranks(comm, device, [&] { ledger = machine.ledger(); });
  };
  if (s.world == 1) {
    CudaDevice device(0, 0, 64 << 10);
    body(*make_single_communicator({}), device);
  } else {
    run_cuda_ranks(machine, s.world, {}, make_nccl_transport, body);
  }
  EXPECT_EQ(machine.findings(), std::vector<std::string>{});
  Counts counts;
  for (const auto& [name, of_kernel] : ledger.kernels) counts[name] = of_kernel.launches;
  for (const auto& [direction, of_copies] : ledger.copies) counts[direction] = of_copies.calls;
  counts[kProduct] = ledger.products.calls;
  return counts;
}

struct WorkOf {
  const char *name, *type;
  int world;
  DType compute;
};
void PrintTo(const WorkOf& w, std::ostream* out) { *out << w.name; }

class StepWork : public ::testing::TestWithParam<WorkOf> {};

TEST_P(StepWork, on_gpus_is_what_the_plan_lists) {
  RunSetup s = setup_of(GetParam().type);
  s.model.layers = 3;
  s.model.hidden = 16;
  s.model.vocab = 37;
  s.model.dropout = s.model.type == "gpt2" ? 0.1F : 0.0F;
  s.sequence = 8;
  s.plan.micro_batches = 2;
  s.world = GetParam().world;
  s.compute = GetParam().compute;
  const Model model = make_model(s.model);
  PolicyOptions offload{.policy = "none"};
  offload.offload.names = {"all"};
  for (const PolicyOptions& policy : {PolicyOptions{.policy = "none"}, PolicyOptions{.policy = "full"},
                                      PolicyOptions{.policy = "selective"}, offload}) {
    SCOPED_TRACE(policy.policy + (policy.offload.names.empty() ? "" : " with offload"));
    s.policy = policy;
    Counts listed;
    for (int rank = 0; rank < s.world; ++rank) {
      const Listed of_rank(s, model, rank);
      for (const auto& [name, times] : of_rank.counts()) listed[name] += times;
    }
    EXPECT_EQ(enqueued(s, model), listed);
  }
}

INSTANTIATE_TEST_SUITE_P(Runs, StepWork,
                         ::testing::Values(WorkOf{"gpt2_on_one_in_fp32", "gpt2", 1, DType::F32},
                                           WorkOf{"gpt2_on_two_in_bf16", "gpt2", 2, DType::BF16},
                                           WorkOf{"llama_on_one_in_bf16", "llama", 1, DType::BF16},
                                           WorkOf{"llama_on_two_in_fp32", "llama", 2, DType::F32}),
                         [](const auto& run) { return std::string(run.param.name); });

std::int64_t enqueued_calls(cuda_emu::Machine& machine) {
  std::int64_t calls = machine.ledger().products.calls;
  for (const auto& [name, of_kernel] : machine.ledger().kernels) calls += of_kernel.launches;
  for (const auto& [direction, of_copies] : machine.ledger().copies) calls += of_copies.calls;
  return calls;
}

// CUDA blocks a host that is about a thousand launches ahead of a device: one that waits for a rank that is gone would
// never learn of it. So between two looks at the other ranks there are a few, also in the loss and in the update.
TEST(StepWork, launches_little_between_two_looks_at_other_ranks) {
  RunSetup s = setup_of("gpt2");
  s.model.vocab = 37;
  s.sequence = 8;
  s.plan.micro_batches = 2;
  const Model model = make_model(s.model);
  cuda_emu::Machine machine({.devices = 1, .blocks_apart = 0, .guarded = false});
  CudaDevice device(0, 0, 64 << 10);
  const auto comm = make_single_communicator({});
  comm->use_memory_of(device);
  Trainer trainer(model, device, *comm, trainer_options(s));
  std::vector<Batch> batches;
  for (int m = 0; m < s.plan.micro_batches; ++m) batches.push_back(make_batch(device, s, 0, 1, 0, m));
  std::int64_t before = 0, most = 0, looks = 0;
  device.between_ops = [&] {
    drain(device);
    most = std::max(most, enqueued_calls(machine) - std::exchange(before, enqueued_calls(machine)));
    ++looks;
  };
  drain(device);
  machine.ledger() = {};
  trainer.step(batches);
  device.between_ops = nullptr;
  drain(device);
  EXPECT_LE(enqueued_calls(machine), 4 * looks);
  EXPECT_LE(most, 16) << looks << " looks, " << enqueued_calls(machine);
}

}  // namespace
}  // namespace regather::testing
