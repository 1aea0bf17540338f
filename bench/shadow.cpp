// What recomputing in the shadow of a gather is worth: two simulated ranks whose collectives take a while.
//   build/cpu/bench/bench_shadow
#include "bench/shadow_steps.h"

int main() {
  using namespace regather;
  bench::print_shadow_title();
  for (const PolicyOptions& policy : {PolicyOptions{.policy = "full"}, bench::keeps_products()})
    for (const int milliseconds : {0, 5, 10, 20}) {
      SimOptions sim;
      sim.delay = std::chrono::milliseconds(milliseconds);
      bench::print_shadow_row(policy.policy, fmt::format("{} ms", milliseconds),
                              bench::measure_in_turn(bench::shadow_steps(policy), 2, sim));
    }
}
