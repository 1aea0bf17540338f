#include "dist/backend.h"

#include <algorithm>

namespace regather {
namespace {

constexpr Backend kBackends[] = {
    {"mpi", Backend::Ranks::Processes, make_mpi_communicator},
    {"sim", Backend::Ranks::Threads, nullptr},
};

}  // namespace

std::span<const Backend> backends() { return kBackends; }

const Backend& find_backend(std::string_view name) {
  const auto found = std::ranges::find(kBackends, name, &Backend::name);
  if (found != std::end(kBackends)) return *found;
  std::string known;
  for (const Backend& backend : kBackends) known += (known.empty() ? "" : ", ") + std::string(backend.name);
  throw UsageError(fmt::format("communication.backend: '{}' is not known; allowed: {}", name, known));
}

}  // namespace regather
