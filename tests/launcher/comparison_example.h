// Comparisons with round figures, in MiB, for tests of what is written and drawn from them.
#pragma once
#include "launcher/comparison.h"

namespace regather::testing {

inline MemoryPeak peak_of(std::int64_t activations, std::int64_t workspace, std::int64_t most_activations) {
  constexpr std::int64_t kMiB = 1 << 20;
  MemoryPeak peak;
  peak.at_peak[index(Tag::Parameters)] = 10 * kMiB;
  peak.at_peak[index(Tag::Gradients)] = 15 * kMiB;
  peak.at_peak[index(Tag::Optimizer)] = 40 * kMiB;
  peak.at_peak[index(Tag::Gathered)] = 5 * kMiB;
  peak.at_peak[index(Tag::Activations)] = activations * kMiB;
  peak.at_peak[index(Tag::Workspace)] = workspace * kMiB;
  for (const std::int64_t bytes : peak.at_peak) peak.total += bytes;
  peak.peak_of = peak.at_peak;
  peak.peak_of[index(Tag::Activations)] = most_activations * kMiB;
  return peak;
}

inline PolicyResult result_of(const std::string& policy, const MemoryPeak& peak, double slowdown, int gathers,
                              double recomputed) {
  PolicyResult p;
  p.policy = policy;
  p.detail = policy + ": layers 0-5 of 6";
  p.planned = p.measured = peak;
  p.seconds = slowdown;
  p.step_seconds = {0.99 * slowdown, slowdown, 1.01 * slowdown};
  p.spread = 0.01;
  p.slowdown = slowdown;
  p.tokens = 1000;
  p.tokens_per_second = 1000 / slowdown;
  p.forward_flops = 1e9;
  p.recomputed_flops = recomputed * 1e9;
  p.collectives[{Collective::AllGather, "block", Pass::Forward, DType::F32}] = {
      .count = gathers, .wire_bytes = std::int64_t{gathers} << 20};
  p.collectives[{Collective::ReduceScatter, "block", Pass::Backward, DType::F32}] = {.count = 5, .wire_bytes = 5 << 20};
  p.loss = 5.5;
  p.timeline.seconds = slowdown;
  p.timeline.backward_begin = 0.4 * slowdown;
  p.timeline.update_begin = 0.9 * slowdown;
  BytesByTag live = peak.at_peak;
  for (int i = 0; i < 10; ++i) {
    live[index(Tag::Activations)] = peak.at_peak[index(Tag::Activations)] * (i < 5 ? i : 9 - i) / 5;
    p.timeline.points.push_back({0.1 * i * slowdown, live});
  }
  p.timeline.points[5].live = peak.at_peak;
  return p;
}

inline Comparison example() {
  Comparison c;
  c.name = "configs/example.yaml";
  c.model = "gpt2, 6 layers";
  c.batch = "micro_batch 4, sequence 256";
  c.world = 2;
  c.steps = c.rounds = 3;
  c.reference = 0;
  c.policies = {result_of("none", peak_of(120, 10, 122), 1.0, 10, 0),
                result_of("full", peak_of(20, 10, 20), 1.28, 10, 0.9),
                result_of("segments", peak_of(40, 10, 41), 1.25, 12, 0.95)};
  return c;
}

// With a limit that `none` does not fit.
inline Comparison limited_example() {
  Comparison c = example();
  c.memory_limit = 150 << 20;
  c.reference = 1;
  PolicyResult none;
  none.policy = "none";
  none.detail = "none: all that is costly is kept";
  none.planned = c.policies[0].planned;
  none.refused = "does not fit: it needs 200.0 MiB";
  c.policies[0] = none;
  for (PolicyResult& p : c.policies) p.slowdown = p.policy == "segments" ? 1.05 : 1;
  return c;
}

}  // namespace regather::testing
