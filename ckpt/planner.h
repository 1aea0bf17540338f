// Which of what each block may keep is kept, what of it waits in host memory, and how many blocks stay resident: the
// least time for every amount of memory, exactly, by dynamic programming over bytes and seconds. Pure: numbers in,
// choices out; the same on every rank. It does not know tapes, marks, devices or where the numbers come from.
//
// A block keeps something from its forward to its backward, when all later blocks have given theirs back. So what a
// choice needs is beside what *earlier* blocks keep; at the head everything is held. With r(b) the bytes that blocks b,
// b+1, ... and the head need beside what earlier blocks keep:
//     r(L) = head,    r(b) = max(need(b), kept(b) + r(b+1))
// which grows with r(b+1). Fewer bytes and fewer seconds for the tail are therefore never worse for the whole, and the
// set of (bytes, seconds) that no other choice beats is carried from the last block to the first.
//
// What is moved to the host leaves the device after the next block's forward and is back before that block's backward:
// beside the next block, and beside no other. Then
//     r(b) = max(need(b), kept(b) + r(b+1), kept(b) + moved(b) + need(b+1))
// and a tail is a triple: what its first block needs counts, too, where the block before it may move something.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace regather {

struct KeepChoice {
  std::int64_t kept = 0;   // bytes on the device from the block's forward to its backward, its input included
  std::int64_t need = 0;   // the most at any time of its own forward and backward: kept, moved, and what comes on top
  double seconds = 0;      // of a step: what its backwards run again, and how long they wait for copies
  std::int64_t moved = 0;  // bytes that are in host memory in between; of the last block: 0
};

struct KeepProblem {
  std::vector<std::vector<KeepChoice>> blocks;  // in forward order; each has at least one choice
  std::int64_t head = 0;                        // the most that is needed while every block's bytes are held
};

// The fastest plans for every amount of memory.
class KeepFrontier {
 public:
  // Sets of more than `states` points are thinned: what is left are still true plans with exact bytes, and at most
  // 2 blocks / states of the bytes away from the best. With fewer points, the frontier is exact.
  static constexpr std::size_t kStates = 4096;
  explicit KeepFrontier(const KeepProblem& problem, std::size_t states = kStates);

  struct Point {
    std::int64_t bytes;  // at the peak
    double seconds;
  };
  const std::vector<Point>& points() const { return points_; }  // more bytes, fewer seconds
  // The last point that needs at most so many bytes; none: not even the first does.
  std::optional<std::size_t> within(std::int64_t bytes) const;
  std::vector<int> choices(std::size_t point) const;  // by block: index of its choice

 private:
  struct State {
    std::int64_t bytes, need;  // need: of the first block alone; 0 where nobody asks
    double seconds;
    int choice;
    std::uint32_t tail;  // state of the next block
  };
  static bool before(const State& a, const State& b);
  static void prune(std::vector<State>& states);
  static std::vector<State> merge(const std::vector<State>& a, const std::vector<State>& b);
  static void thin(std::vector<State>& states, std::size_t most);

  std::vector<std::vector<State>> states_;  // by block
  std::vector<Point> points_;
};

// Slots: a resident block costs its bytes at every moment, and saves gathers.
struct SlotProblem {
  std::int64_t bytes_per_slot = 0;
  std::vector<double> seconds;  // of the gathers of a step with 1, 2, ... slots
};
struct ResidentPlan {
  int slots = 1;
  std::size_t point = 0;   // of the frontier
  std::int64_t bytes = 0;  // of both
  double seconds = 0;
};
// The fastest slots and keep choices that need at most so many bytes; the fewest slots among equals.
std::optional<ResidentPlan> plan_slots(const KeepFrontier& frontier, const SlotProblem& slots, std::int64_t bytes);

}  // namespace regather
