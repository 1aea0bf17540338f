#include "launcher/launch_place.h"

#include <array>
#include <cstdlib>

namespace regather {

std::optional<int> whole_number(const char* text) {
  if (text == nullptr) return std::nullopt;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (end == text || *end != '\0' || value < 0 || value > 1 << 24) return std::nullopt;
  return static_cast<int>(value);
}

LaunchPlace launch_place() {
  return launch_place([](const char* name) -> const char* { return std::getenv(name); });
}

LaunchPlace launch_place(const std::function<const char*(const char*)>& variable) {
  struct Launcher {
    const char *rank, *ranks;
  };
  // Open MPI, Slurm, MPICH. Slurm's step variables: a batch script has a rank, but is no step.
  static constexpr std::array<Launcher, 3> kLaunchers = {{{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                                          {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"},
                                                          {"PMI_RANK", "PMI_SIZE"}}};
  for (const Launcher& launcher : kLaunchers) {
    const std::optional<int> rank = whole_number(variable(launcher.rank)),
                             ranks = whole_number(variable(launcher.ranks));
    if (rank && ranks && *rank < *ranks) return {*rank, *ranks};
  }
  if (const std::optional<int> rank = whole_number(variable("PMIX_RANK"))) return {*rank, *rank + 1};
  return {};
}

}  // namespace regather
