// NCCL: ranks are host threads of this process. Contributions are added in rank order (a real library's order is its
// own).
#include <cuda_bf16.h>
#include <fmt/format.h>

#include <cstring>

#include "tests/cuda_emu/meetings.h"
#include "tests/cuda_emu/sanitizers.h"
#include "tests/cuda_emu/state.h"

using cuda_emu::Collective;
using cuda_emu::Group;
using cuda_emu::Round;
using cuda_emu::state;

struct ncclComm {
  std::shared_ptr<Group> group;
  int rank;
  std::int64_t next = 0;
  std::shared_ptr<bool> aborted = std::make_shared<bool>(false);
  std::shared_ptr<std::int64_t> in_flight = std::make_shared<std::int64_t>(0);
  std::vector<std::function<void()>> launching{};  // what calls have started and not enqueued yet
  bool finalizing = false;
};

namespace {

const char* name_of(Collective c) {
  return c == Collective::AllGather ? "AllGather" : c == Collective::ReduceScatter ? "ReduceScatter" : "AllReduce";
}
const char* name_of(ncclDataType_t type) {
  switch (type) {
    case ncclFloat32: return "fp32";
    case ncclBfloat16: return "bf16";
    case ncclInt32: return "int32";
    case ncclFloat64: return "fp64";
    default: return "another type";
  }
}
std::size_t bytes_of(ncclDataType_t type) { return type == ncclBfloat16 ? 2 : type == ncclFloat64 ? 8 : 4; }

// Elements [begin, begin + n) summed over ranks, written to every target.
template <class T, class Sum, class Get, class Put>
void add_up(const Round& round, std::size_t begin, std::size_t n, void* to, Get get, Put put) {
  for (std::size_t i = 0; i < n; ++i) {
    Sum sum = get(static_cast<const T*>(round.parts[0].send)[begin + i]);
    for (std::size_t r = 1; r < round.parts.size(); ++r)
      sum += get(static_cast<const T*>(round.parts[r].send)[begin + i]);
    static_cast<T*>(to)[i] = put(sum);
  }
}
void add_up(const Round& round, std::size_t begin, std::size_t n, void* to) {
  if (round.type == ncclFloat32)
    add_up<float, float>(
        round, begin, n, to, [](float x) { return x; }, [](float x) { return x; });
  else if (round.type == ncclFloat64)
    add_up<double, double>(
        round, begin, n, to, [](double x) { return x; }, [](double x) { return x; });
  else if (round.type == ncclBfloat16)
    add_up<__nv_bfloat16, float>(
        round, begin, n, to, [](__nv_bfloat16 x) { return __bfloat162float(x); },
        [](float x) { return __float2bfloat16(x); });
  else
    state().report(fmt::format("{} of {} is not emulated", name_of(round.collective), name_of(round.type)));
}

void move(const Round& round) {
  const std::size_t ranks = round.parts.size(), count = static_cast<std::size_t>(round.count),
                    bytes = count * bytes_of(round.type);
  const std::size_t sent = round.collective == Collective::ReduceScatter ? bytes * ranks : bytes;
  const std::size_t received = round.collective == Collective::AllGather ? bytes * ranks : bytes;
  for (const Round::Part& part : round.parts) {
    if (!state().check(part.send, sent, round.text + ", sent") ||
        !state().check(part.receive, received, round.text + ", received"))
      return;
    cuda_emu::will_read(part.send, sent);
    cuda_emu::will_write(part.receive, received);
  }
  if (round.collective == Collective::AllGather) {
    std::vector<std::vector<char>> all;  // a rank's target may be where it sends from
    for (const Round::Part& part : round.parts)
      all.emplace_back(static_cast<const char*>(part.send), static_cast<const char*>(part.send) + bytes);
    for (const Round::Part& part : round.parts)
      for (std::size_t r = 0; r < ranks; ++r)
        std::memcpy(static_cast<char*>(part.receive) + r * bytes, all[r].data(), bytes);
    return;
  }
  const bool scatters = round.collective == Collective::ReduceScatter;
  std::vector<std::vector<char>> sums;
  for (std::size_t r = 0; r < (scatters ? ranks : 1); ++r)
    add_up(round, r * count, count, sums.emplace_back(bytes).data());
  for (std::size_t r = 0; r < ranks; ++r) std::memcpy(round.parts[r].receive, sums[scatters ? r : 0].data(), bytes);
}

std::int64_t ring_bytes(const Round& round) {  // that one rank sends
  const auto ranks = static_cast<std::int64_t>(round.parts.size());
  const std::int64_t bytes = round.count * static_cast<std::int64_t>(bytes_of(round.type));
  return round.collective == Collective::AllReduce ? 2 * bytes * (ranks - 1) / ranks : bytes * (ranks - 1);
}

void post(ncclComm& comm, Collective collective, const void* send, void* receive, std::size_t count,
          ncclDataType_t type, cudaStream_t stream) {
  cuda_emu::State& s = state();
  const std::int64_t number = comm.next++;
  const std::string text = fmt::format("{} of {} x {}", name_of(collective), name_of(type), count);
  std::shared_ptr<Round>& slot = comm.group->rounds[number];
  if (!slot) {
    slot = std::make_shared<Round>(
        Round{collective, static_cast<std::int64_t>(count), type, text, comm.rank, {}, 0, 0, false});
    slot->parts.resize(static_cast<std::size_t>(comm.group->ranks));
  }
  const std::shared_ptr<Round> round = slot;
  if (round->text != text)
    s.report(fmt::format("collective {}: rank {} calls {}, rank {} calls {}", number, comm.rank, text,
                         round->first_rank, round->text));
  if (s.failing_collective && *s.failing_collective == std::pair(comm.rank, number)) comm.group->failed = true;
  round->parts[static_cast<std::size_t>(comm.rank)] = {send, receive};
  const std::shared_ptr<Group> group = comm.group;
  const std::shared_ptr<bool> aborted = comm.aborted;
  const std::shared_ptr<std::int64_t> in_flight = comm.in_flight;
  ++*in_flight;
  s.enqueue(stream, text, [round, aborted] {
    if (*aborted) return;
    ++round->arrived;
    cuda_emu::release(round->order.get());
  });
  s.enqueue(
      stream, text,
      [round, group, aborted, in_flight, number, &s] {
        --*in_flight;
        if (*aborted) return;
        cuda_emu::acquire(round->order.get());
        if (!std::exchange(round->moved, true)) move(*round);
        cuda_emu::release(round->order.get());
        cuda_emu::Counts& counts =
            s.ledger.collectives[fmt::format("{} of {}", name_of(round->collective), name_of(round->type))];
        ++counts.calls;
        counts.bytes += ring_bytes(*round);
        if (++round->left == group->ranks) group->rounds.erase(number);
      },
      [round, group, aborted] {
        return *aborted || (!group->failed && !group->aborted && round->arrived == group->ranks);
      });
}

ncclResult_t start(ncclComm_t comm, Collective collective, const void* send, void* receive, std::size_t count,
                   ncclDataType_t type, cudaStream_t stream) {
  if (!comm || *comm->aborted) return ncclInvalidArgument;
  if (state().host().context->failed) return ncclUnhandledCudaError;
  auto later = [=] { post(*comm, collective, send, receive, count, type, stream); };
  cuda_emu::Host& host = state().host();
  if (!comm->launching.empty() && !host.launches_late)
    state().report(fmt::format("{} on a communicator that is still in progress", name_of(collective)));
  if (state().options.late_collectives) {
    comm->launching.emplace_back(later);
    host.launches_late = host.group_depth > 0;
    return host.group_depth > 0 ? ncclSuccess : ncclInProgress;
  }
  if (host.group_depth > 0)
    host.in_group.emplace_back(later);
  else
    later();
  return ncclSuccess;
}

}  // namespace

#define API extern "C" ncclResult_t

API ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 0, sizeof *id);
  const std::string text = fmt::format("emulated {}", state().meetings->new_id());
  std::memcpy(id->internal, text.data(), text.size());
  return ncclSuccess;
}
// Not blocking, whatever is asked for: in progress until every rank has come.
API ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (rank < 0 || rank >= ranks) return ncclInvalidArgument;
  if (!config || config->blocking != 0) state().report("ncclCommInitRankConfig that blocks: it could hang");
  const std::shared_ptr<Group> group = state().meetings->group(id.internal, ranks);
  ++group->joined;
  *comm = new ncclComm{.group = group, .rank = rank};
  ++state().communicators;
  ++state().communicators_made;
  return ncclInProgress;
}
API ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (!comm->launching.empty() && state().draw(2) == 0)
    for (const auto& launch : std::exchange(comm->launching, {})) launch();
  const auto waiting = [&] {
    return comm->group->joined < comm->group->ranks || !comm->launching.empty() ||
           (comm->finalizing && *comm->in_flight > 0);
  };
  const bool hopeless = waiting() && !state().poll("ncclCommGetAsyncError");
  *error = comm->group->failed ? ncclRemoteError
           : hopeless          ? ncclSystemError
           : waiting()         ? ncclInProgress
                               : ncclSuccess;
  return ncclSuccess;
}
API ncclCommAbort(ncclComm_t comm) {
  *comm->aborted = comm->group->aborted = true;
  delete comm;
  --state().communicators;
  return ncclSuccess;
}
API ncclCommFinalize(ncclComm_t comm) {
  comm->finalizing = true;
  return ncclInProgress;
}
API ncclCommDestroy(ncclComm_t comm) {
  if (*comm->in_flight > 0) state().report("ncclCommDestroy of a communicator with collectives in flight");
  delete comm;
  --state().communicators;
  return ncclSuccess;
}
extern "C" const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInProgress: return "NCCL operation in progress";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    default: return "emulated error";
  }
}
extern "C" const char* ncclGetLastError(ncclComm_t) { return ""; }

API ncclAllGather(const void* send, void* receive, std::size_t count, ncclDataType_t type, ncclComm_t comm,
                  cudaStream_t stream) {
  return start(comm, Collective::AllGather, send, receive, count, type, stream);
}
API ncclReduceScatter(const void* send, void* receive, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                      ncclComm_t comm, cudaStream_t stream) {
  return op == ncclSum ? start(comm, Collective::ReduceScatter, send, receive, count, type, stream)
                       : ncclInvalidArgument;
}
API ncclAllReduce(const void* send, void* receive, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                  ncclComm_t comm, cudaStream_t stream) {
  return op == ncclSum ? start(comm, Collective::AllReduce, send, receive, count, type, stream) : ncclInvalidArgument;
}
API ncclGroupStart() {
  ++state().host().group_depth;
  return ncclSuccess;
}
API ncclGroupEnd() {
  cuda_emu::Host& host = state().host();
  if (--host.group_depth > 0) return ncclSuccess;
  if (std::exchange(host.launches_late, false)) return ncclInProgress;
  for (const auto& later : std::exchange(host.in_group, {})) later();
  return ncclSuccess;
}
