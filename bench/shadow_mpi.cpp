// bench_shadow between the processes of mpirun, over the link that joins them: prints one row of its table.
//   bench/slow_link 1gbit build/cpu/bench/bench_shadow_mpi
#include "bench/shadow_steps.h"

int main() {
  using namespace regather;
  const auto comm = make_mpi_communicator({});
  const PolicyOptions policy = bench::keeps_products();
  const std::vector<bench::Measured> measured = bench::measure_in_turn(bench::shadow_steps(policy), *comm);
  if (comm->rank() != 0) return 0;
  bench::print_shadow_title();
  bench::print_shadow_row(policy.policy, "mpi", measured);
}
