// collectives_mpi [MIB...]: the communicator's collectives beside memcpy and Open MPI's own, in one run, for shards of
// so many MiB a rank (1, 16 and 64 unless given). Best of several rounds, since other work on the machine only adds
// time; the figures are GB/s of the bytes that one rank receives, so that they compare with memcpy's.
#define OMPI_SKIP_MPICXX 1
#include <fmt/format.h>
#include <mpi.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>

#include "dist/communicator.h"

namespace regather {
namespace {

constexpr int kRounds = 9;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

struct HugeBuffer {
  explicit HugeBuffer(std::int64_t floats) {
    const std::size_t bytes =
        (static_cast<std::size_t>(floats) * sizeof(float) + kHugePage - 1) / kHugePage * kHugePage;
    data = static_cast<float*>(std::aligned_alloc(kHugePage, bytes));
    check(data != nullptr, "no memory for {} bytes", bytes);
    madvise(data, bytes, MADV_HUGEPAGE);
    std::fill_n(data, floats, 1.0f);
  }
  ~HugeBuffer() { std::free(data); }
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;
  float* data;
};

// The slowest rank's time of the best round.
double best(const std::function<void()>& work) {
  double fastest = std::numeric_limits<double>::max();
  for (int round = 0; round < kRounds; ++round) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double begun = MPI_Wtime();
    work();
    double seconds = MPI_Wtime() - begun;
    MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    fastest = std::min(fastest, seconds);
  }
  return fastest;
}

void measure(Communicator& c, std::int64_t mib) {
  const std::int64_t shard = mib * (std::int64_t{1} << 20) / static_cast<std::int64_t>(sizeof(float));
  const int count = static_cast<int>(shard);
  const std::size_t shard_bytes = static_cast<std::size_t>(shard) * sizeof(float);
  const HugeBuffer full(c.size() * shard), other(c.size() * shard), owned(shard);
  const GatherBuffer buffer{full.data, shard, DType::F32};
  const double received = static_cast<double>(c.size() - 1) * static_cast<double>(shard_bytes) / 1e9;
  const auto row = [&](const char* name, const std::function<void()>& work) {
    const double seconds = best(work);
    if (c.rank() == 0)
      fmt::print("{:>6} MiB  {:<40} {:>9.3f} ms {:>7.2f} GB/s\n", mib, name, seconds * 1e3, received / seconds);
  };
  row("memcpy of what is received",
      [&] { std::memcpy(other.data, full.data, static_cast<std::size_t>(c.size() - 1) * shard_bytes); });
  row("all_gather", [&] { c.all_gather({&buffer, 1}, {.unit = "bench", .pass = Pass::Forward}).wait(); });
  row("  MPI_Allgather, in place",
      [&] { MPI_Allgather(MPI_IN_PLACE, 0, MPI_FLOAT, full.data, count, MPI_FLOAT, MPI_COMM_WORLD); });
  row("  MPI_Allgather, to another buffer",
      [&] { MPI_Allgather(owned.data, count, MPI_FLOAT, full.data, count, MPI_FLOAT, MPI_COMM_WORLD); });
  row("reduce_scatter (adds to the shard)",
      [&] { c.reduce_scatter(full.data, owned.data, shard, {.unit = "bench", .pass = Pass::Backward}).wait(); });
  row("  MPI_Reduce_scatter_block",
      [&] { MPI_Reduce_scatter_block(full.data, owned.data, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); });
  row("all_reduce (twice these bytes)",
      [&] { c.all_reduce(other.data, shard, {.unit = "bench", .pass = Pass::Backward}).wait(); });
  row("  MPI_Allreduce, in place",
      [&] { MPI_Allreduce(MPI_IN_PLACE, other.data, count * c.size(), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); });
}

void latency(Communicator& c) {
  std::vector<double> scalars(4);
  constexpr int kCalls = 200;
  const double seconds = best([&] {
    for (int i = 0; i < kCalls; ++i) c.all_reduce(scalars, {.unit = "scalars", .pass = Pass::Step});
  });
  if (c.rank() == 0) fmt::print("4 scalars: {:.1f} us a call\n", seconds / kCalls * 1e6);
}

}  // namespace
}  // namespace regather

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  {
    const auto communicator = regather::make_mpi_communicator({});
    std::vector<std::int64_t> sizes;
    for (int i = 1; i < argc; ++i) sizes.push_back(std::max(1L, std::atol(argv[i])));
    if (sizes.empty()) sizes = {1, 16, 64};
    for (const std::int64_t mib : sizes) regather::measure(*communicator, mib);
    regather::latency(*communicator);
  }
  MPI_Finalize();
  return 0;
}
