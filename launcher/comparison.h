// What a comparison of checkpoint policies found, as plain values: what it is reported, drawn and tested from.
// Bytes are of one rank: of the rank whose peak is largest; seconds are those of the slowest rank. It measures nothing.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "dist/ledger.h"
#include "tensor/memory.h"

namespace regather {

// The memory of one step of rank 0, in the order in which it changed.
struct MemoryTimeline {
  struct Point {
    double seconds;  // since the step began
    BytesByTag live;
  };
  std::vector<Point> points;
  double seconds = 0;                           // of the step
  double backward_begin = 0, update_begin = 0;  // 0: several micro-batches, forward and backward alternate
};
// The same with at most `points` points: in each stretch of time, what was live when the total was largest.
MemoryTimeline thinned(const MemoryTimeline& timeline, std::size_t points);

struct MemoryPeak {
  std::int64_t total = 0;
  BytesByTag at_peak{}, peak_of{};  // at_peak adds up to total; peak_of: each kind's own, at any time
};

struct PolicyResult {
  std::string policy, detail;  // "every_n_layers", "every_n_layers 2: layers 0, 2, 4 of 6"
  std::string refused;         // why it did not run: memory; empty: it ran, and what follows was measured
  MemoryPeak planned, measured;
  std::int64_t resident_growth = 0;  // of the process, at its peak, from before the model was made
  std::vector<double> step_seconds;  // by round, the median of its measured steps
  std::vector<double> spreads;       // by round, half the range of those steps, by the median
  double seconds = 0;                // the median over the rounds
  double spread = 0;                 // half the range of the rounds, by the median; of the only one: its steps'
  double slowdown = 1;               // median over the rounds of the ratio to the reference
  std::int64_t tokens = 0;           // of a step and all ranks
  double tokens_per_second = 0, recomputed_flops = 0, forward_flops = 0;
  Ledger::Entries collectives;                          // of one step and rank
  std::vector<std::string> communication_differs;       // from the plan, on any rank; empty: as planned
  double loss = 0;                                      // of the first step
  double loss_difference = 0, gradient_difference = 0;  // largest, to the reference
  bool identical = true;  // the loss of every step and every gradient of the first, bit for bit
  MemoryTimeline timeline;

  bool ran() const { return refused.empty(); }
  bool as_planned() const { return communication_differs.empty(); }
};

struct Comparison {
  std::string name;                  // of the configuration file
  std::string model, batch;          // in words
  std::string configuration = "{}";  // effective, as JSON
  std::int64_t world = 1, steps = 1, rounds = 1;
  std::int64_t memory_limit = 0;  // 0: none
  bool sharded = true;            // parameters, gradients and optimizer state are
  std::int64_t resident_slots = 2;
  int reference = -1;  // index of the policy that the others are compared with; -1: none ran
  std::vector<PolicyResult> policies;
};

// Everything that has to be equal is: the same numbers under every policy, and the communication that was planned.
bool holds(const Comparison& comparison);

}  // namespace regather
