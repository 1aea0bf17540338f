// The two steps that bench_shadow and bench_shadow_mpi compare. The same values are rerun either way: `eager` reruns in
// the order of forward, so it waits for the first matrix; `ahead` begins with all that reads none. Where q k v, the
// MLP's first product and the middle are kept, that is all that is rerun; under `full` it is the norm a block begins
// with. One slot and no prefetch, so that every backward begins with a gather.
#pragma once
#include <fmt/format.h>

#include <cstdio>

#include "bench/step_time.h"

namespace regather::bench {

inline std::vector<StepTime> shadow_steps(const PolicyOptions& policy) {
  std::vector<StepTime> steps;
  for (const Order order : {Order::Eager, Order::Ahead}) {
    StepTime& s = steps.emplace_back();
    s.model = {.type = "gpt2", .layers = 6, .hidden = 256, .heads = 4, .vocab = 256, .max_sequence = 1024};
    s.policy = policy;
    s.policy.order = order;
    s.slots = 1;
    s.prefetch = 0;
  }
  return steps;
}
inline PolicyOptions keeps_products() { return {.policy = "selective", .keep = {{.keep = {"qkv", "mlp.up", "mid"}}}}; }

inline void print_shadow_title() {
  fmt::print("{:>10} {:>12} {:>16} {:>18} {:>9} {:>7} {:>12}\n", "policy", "link", "wait first, ms",
             "in the shadow, ms", "shorter", "spread", "hidden, ms");
}
inline void print_shadow_row(std::string_view policy, std::string_view link, const std::vector<Measured>& of) {
  const double first = median(of[0].seconds), shadow = median(of[1].seconds);
  fmt::print("{:>10} {:>12} {:>16.1f} {:>18.1f} {:>8.1f}% {:>6.1f}% {:>12.2f}\n", policy, link, 1e3 * first,
             1e3 * shadow, 100 * (1 - shadow / first), 100 * std::max(spread(of[0].seconds), spread(of[1].seconds)),
             1e3 * median(of[1].hidden));
  std::fflush(stdout);  // a row takes its time
}

}  // namespace regather::bench
