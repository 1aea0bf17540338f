// Where the threads of a block and the lanes of a warp meet: barriers, votes and shuffles. Who comes to another place
// than the others, or reads a lane that takes no part, is a finding.
#include <fmt/format.h>

#include <algorithm>

#include "tests/cuda_emu/grid.h"
#include "tests/cuda_emu/sanitizers.h"

namespace cuda_emu {

std::string text_of(Place place) {
  const std::string_view file = place.file;
  return fmt::format("{}:{}", file.substr(file.rfind('/') + 1), place.line);
}

namespace {
bool same(Place a, Place b) { return a.line == b.line && std::string_view(a.file) == b.file; }
}  // namespace

void Grid::release_barrier() {
  any_result_[generation_ & 1] = any_;
  all_result_[generation_ & 1] = all_;
  arrived_ = 0;
  ++generation_;
  for (Thread& t : threads_)
    if (t.state == ThreadState::AtBarrier) t.state = ThreadState::Ready;
}

bool Grid::block_barrier(Vote vote, bool mine, Place place) {
  if (arrived_++ == 0) {
    barrier_place_ = place;
    any_ = false;
    all_ = true;
  } else if (!same(place, barrier_place_)) {
    fault(fmt::format("threads of one block are at different barriers: {} and {}", text_of(barrier_place_),
                      text_of(place)));
  }
  any_ = any_ || mine;
  all_ = all_ && mine;
  if (apart_) cuda_emu::release(&orders_[kSync]);
  const unsigned now = generation_;
  if (arrived_ == threads_.size())
    release_barrier();
  else
    while (generation_ == now) wait_as(ThreadState::AtBarrier);
  if (apart_) acquire(&orders_[kSync]);
  return vote == Vote::Any ? any_result_[now & 1] : vote == Vote::All ? all_result_[now & 1] : false;
}

unsigned Grid::existing_lanes() const {
  const std::size_t count = std::min<std::size_t>(32, threads_.size() - warp() * 32);
  return count == 32 ? ~0U : (1U << count) - 1;
}

// Waits for the lanes of the mask; returns which exchange it was. Only __syncwarp orders memory: a shuffle does not.
unsigned Grid::exchange(unsigned mask, std::uint64_t mine, Place place, bool orders_memory, WarpWork work) {
  Exchange& warp_exchange = warps_[warp()];
  const int lane = this_thread->lane;
  const unsigned now = warp_exchange.generation;
  if ((mask >> lane & 1U) == 0)
    fault(fmt::format("lane {} is not in its own mask {:08x} at {}", lane, mask, text_of(place)));
  if (warp_exchange.arrived == 0) {
    warp_exchange.mask = mask;
    warp_exchange.places[now & 1] = place;
  } else if (warp_exchange.mask != mask || !same(warp_exchange.places[now & 1], place)) {
    fault(fmt::format("lanes of one warp exchange at different places: {} (mask {:08x}) and {} (mask {:08x})",
                      text_of(warp_exchange.places[now & 1]), warp_exchange.mask, text_of(place), mask));
  }
  warp_exchange.values[now & 1][static_cast<std::size_t>(lane)] = mine;
  warp_exchange.arrived |= 1U << lane;
  if (apart_ && orders_memory) cuda_emu::release(warp_exchange.order.get());
  if (warp_exchange.arrived == (mask & existing_lanes())) {
    if (work) work(warp_exchange.values[now & 1]);
    warp_exchange.arrived = 0;
    ++warp_exchange.generation;
    for (std::size_t t = warp() * 32; t < std::min(threads_.size(), warp() * 32 + 32); ++t)
      if (threads_[t].state == ThreadState::InExchange) threads_[t].state = ThreadState::Ready;
  } else {
    while (warp_exchange.generation == now) wait_as(ThreadState::InExchange);
  }
  if (apart_ && orders_memory) acquire(warp_exchange.order.get());
  return now;
}

void Grid::as_one_warp(void* mine, WarpWork work, Place place) {
  if (existing_lanes() != ~0U)
    fault(
        fmt::format("a warp of {} threads does what takes 32, at {}", std::popcount(existing_lanes()), text_of(place)));
  exchange(~0U, reinterpret_cast<std::uint64_t>(mine), place, false, work);
}

// ---- what device code calls -----------------------------------------------------------------------------------------

bool block_barrier(Vote vote, bool mine, Place place) {
  const DeviceCall call;
  return call.grid.block_barrier(vote, mine, place);
}
void warp_barrier(unsigned mask, Place place) {
  const DeviceCall call;
  call.grid.exchange(mask, 0, place, true);
}
std::uint64_t warp_read(unsigned mask, std::uint64_t mine, int lane, Place place) {
  const DeviceCall call;
  Grid& grid = call.grid;
  const unsigned now = grid.exchange(mask, mine, place, false), existing = grid.existing_lanes();
  if (lane < 0 || lane > 31 || (mask >> lane & 1U) == 0)
    grid.fault(
        fmt::format("a shuffle reads lane {}, which is not in its mask {:08x}, at {}", lane, mask, text_of(place)));
  if ((existing >> lane & 1U) == 0)
    grid.fault(fmt::format("a shuffle reads lane {} of a warp that has {} threads, at {}", lane,
                           std::popcount(existing), text_of(place)));
  return grid.value_of(now, lane);
}
unsigned warp_ballot(unsigned mask, bool mine, Place place) {
  const DeviceCall call;
  Grid& grid = call.grid;
  const unsigned now = grid.exchange(mask, mine ? 1 : 0, place, false), voters = mask & grid.existing_lanes();
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane)
    if ((voters >> lane & 1U) != 0 && grid.value_of(now, lane) != 0) votes |= 1U << lane;
  return votes;
}

}  // namespace cuda_emu
