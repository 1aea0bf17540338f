#include "dist/backend.h"

#include <algorithm>

#include "dist/transport.h"

namespace regather {
namespace {

constexpr Backend kBackends[] = {
    {"mpi", Backend::Ranks::Processes, Backend::Moves::Host, make_mpi_communicator},
    {"sim", Backend::Ranks::Threads, Backend::Moves::Host, nullptr},
    {"nccl", Backend::Ranks::Processes, Backend::Moves::Gpu, make_nccl_communicator},
    {"staged", Backend::Ranks::Processes, Backend::Moves::Gpu, make_staged_communicator},
};

}  // namespace

std::span<const Backend> backends() { return kBackends; }

std::unique_ptr<Communicator> make_mpi_communicator(const CommunicatorOptions& options) {
  Joined joined = join_mpi(options);
  return std::make_unique<Communicator>(joined.rank, joined.size, options, std::move(joined.transport));
}

const Backend& find_backend(std::string_view name) {
  const auto found = std::ranges::find(kBackends, name, &Backend::name);
  if (found != std::end(kBackends)) return *found;
  std::string known;
  for (const Backend& backend : kBackends) known += (known.empty() ? "" : ", ") + std::string(backend.name);
  throw UsageError(fmt::format("communication.backend: '{}' is not known; allowed: {}", name, known));
}

}  // namespace regather
