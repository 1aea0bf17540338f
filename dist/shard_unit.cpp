#include "dist/shard_unit.h"

#include <algorithm>

#include "tensor/host_view.h"
#include "tensor/trace.h"

namespace regather {
namespace {

constexpr auto kFloat = static_cast<std::int64_t>(sizeof(float));
constexpr std::int64_t kStartValues = std::int64_t{1} << 16;  // made at a time where they are not kept in fp32

FlatLayout layout_of(const std::vector<ParamInfo>& params, bool trainable, int world) {
  std::vector<std::int64_t> sizes;
  for (const ParamInfo& p : params)
    if (p.trainable == trainable) sizes.push_back(p.shape.numel());
  return {sizes, world};
}

template <class T = float>
T* at(const Buffer& buffer, std::int64_t offset) {
  T* data = buffer.data<T>();
  return data ? data + offset : nullptr;
}

}  // namespace

ShardUnit::ShardUnit(UnitSpec spec, std::string ledger_name, Device& device, Communicator& comm,
                     const UnitOptions& options)
    : spec_(std::move(spec)),
      ledger_name_(std::move(ledger_name)),
      device_(device),
      comm_(comm),
      options_(options),
      trainable_(layout_of(spec_.params, true, comm.size())),
      frozen_(layout_of(spec_.params, false, comm.size())),
      written_(spec_.params.size(), false) {
  std::size_t next[2] = {0, 0};
  for (std::size_t i = 0; i < spec_.params.size(); ++i) {
    const bool frozen = !spec_.params[i].trainable;
    const bool vector = spec_.params[i].shape.ndim() == 1;
    places_.push_back({frozen, next[frozen]++, vector ? vector_elements_ : -1});
    if (vector) vector_elements_ += spec_.params[i].shape.numel();
    (frozen ? frozen_params_ : trainable_params_).push_back(static_cast<int>(i));
  }
  const Allocator::Asking asking(device_.memory, spec_.name);
  values_ = Buffer(device_.memory, local_elements(trainable_) * kFloat, Tag::Parameters);
  frozen_values_ = Buffer(device_.memory, local_elements(frozen_) * kFloat, Tag::Parameters);
  if (replicated() && rounded()) {
    const auto element = static_cast<std::int64_t>(size_of(options_.compute));
    replica_ = Buffer(device_.memory, trainable_.padded() * element, Tag::Parameters);
    frozen_replica_ = Buffer(device_.memory, frozen_.padded() * element, Tag::Parameters);
  }
  const bool all = options_.strategy == Strategy::None;
  // With one reduction a step, data parallel ranks reduce the running buffer in place.
  if (!all || options_.reductions_per_step > 1)
    gradient_ = Buffer(device_.memory, (all ? trainable_.padded() : trainable_.shard()) * kFloat, Tag::Gradients);
  if (!device_.meta()) fill_start_values();
}

ShardUnit::~ShardUnit() {
  bool flying = reducing_ && Communicator::give_up(reduced_);
  if (!waited_) flying = Communicator::give_up(full_.arrival) || flying;
  for (const Copy& copy : orphans_) flying = Communicator::give_up(copy.arrival) || flying;
  if (!flying) return;
  try {  // memory is freed in the order of compute
    const Event gathers = device_.record(Stream::Gather), reductions = device_.record(Stream::Reduce);
    device_.wait(Stream::Compute, gathers);
    device_.wait(Stream::Compute, reductions);
  } catch (...) {  // a device that has failed says so where it is waited for
  }
}

// Elements of the rank's shard.
void ShardUnit::fill(const FlatLayout& layout, const std::vector<int>& params, int rank, float* shard) const {
  for (const FlatLayout::Piece& piece : layout.pieces(rank))
    initialize(spec_.params[static_cast<std::size_t>(params[piece.param])], options_.seed, piece.first, piece.size,
               shard + piece.offset);
}

void ShardUnit::fill_start_values() {
  for (const bool frozen : {false, true}) {
    const Buffer& values = frozen ? frozen_values_ : values_;
    const FlatLayout& layout = frozen ? frozen_ : trainable_;
    const std::vector<int>& params = frozen ? frozen_params_ : trainable_params_;
    write_from_host(device_, values.data<float>(), local_elements(layout), [&](float* data) {
      std::fill_n(data, local_elements(layout), 0.0F);
      for (int rank = 0; rank < comm_.size(); ++rank)
        if (whole() || rank == comm_.rank()) fill(layout, params, rank, data + (whole() ? layout.shard() * rank : 0));
    });
    if (replicated() && rounded()) make_replica(layout, params, values, frozen ? frozen_replica_ : replica_);
  }
}

// Start values of other ranks' shards are made here, piece by piece, and not gathered.
void ShardUnit::make_replica(const FlatLayout& layout, const std::vector<int>& params, const Buffer& values,
                             Buffer& replica) {
  if (whole()) return device_.round(Stream::Compute, replica.data<Bf16>(), values.data<float>(), layout.padded());
  device_.zero(Stream::Compute, replica.data(), replica.bytes());
  const Buffer some(device_.memory, std::min(kStartValues, layout.shard()) * kFloat, Tag::Workspace);
  for (int rank = 0; rank < comm_.size(); ++rank)
    for (const FlatLayout::Piece& piece : layout.pieces(rank))
      for (std::int64_t i = 0; i < piece.size; i += kStartValues) {
        const std::int64_t n = std::min(kStartValues, piece.size - i);
        write_from_host(device_, some.data<float>(), n, [&](float* piece_values) {
          initialize(spec_.params[static_cast<std::size_t>(params[piece.param])], options_.seed, piece.first + i, n,
                     piece_values);
        });
        device_.round(Stream::Compute, replica.data<Bf16>() + layout.shard() * rank + piece.offset + i,
                      some.data<float>(), n);
      }
}

// ---- parameters -----------------------------------------------------------------------------------------------------

void ShardUnit::prefetch(Pass pass) {
  if (resident()) return;
  std::erase_if(orphans_, [](const Copy& copy) { return copy.arrival.done(); });
  const Allocator::Asking asking(device_.memory, spec_.name);
  Copy copy;
  std::vector<GatherBuffer> buffers;
  const auto place = [&](const FlatLayout& layout, const Buffer& shard) {
    if (layout.total() == 0) return Buffer();
    Buffer slot = slot_with(layout, shard);
    buffers.push_back({slot.data(), layout.shard(), options_.compute});
    return slot;
  };
  copy.trainable = place(trainable_, values_);
  copy.frozen = place(frozen_, frozen_values_);
  copy.placed = device_.record(Stream::Gather);
  try {
    copy.arrival = comm_.all_gather(buffers, label(pass));
  } catch (...) {
    device_.wait(Stream::Compute, copy.placed);  // memory is freed in the order of compute
    throw;
  }
  full_ = std::move(copy);
  waited_ = false;
  if (device_.trace) device_.trace->line("gather " + spec_.name);
}

// Room for all, with this rank's part in it.
Buffer ShardUnit::slot_with(const FlatLayout& layout, const Buffer& values) {
  Buffer slot(device_.memory, layout.padded() * static_cast<std::int64_t>(size_of(options_.compute)), Tag::Gathered);
  const std::int64_t begin = layout.shard() * comm_.rank();
  // It is there, and what was enqueued before no longer reads it, or writes the values.
  device_.wait(Stream::Gather, device_.record(Stream::Compute));
  if (rounded())
    device_.round(Stream::Gather, at<Bf16>(slot, begin), values.data<float>(), layout.shard());
  else
    device_.copy(Stream::Gather, at(slot, begin), values.data(), values.bytes());
  return slot;
}

ShardUnit::Lease ShardUnit::acquire(Pass pass) {
  prefetch(pass);
  return Lease(*this);
}

void ShardUnit::wait_for_gather() {
  if (std::exchange(waited_, true)) return;
  if (device_.trace && !replicated()) device_.trace->line("wait " + spec_.name);
  const Waiting waiting(device_.trace);
  device_.wait(Stream::Compute, full_.placed);
  device_.wait(Stream::Compute, full_.arrival);
}

const void* ShardUnit::data(int i) {
  check(leases_ > 0, "{}: a parameter is read without a lease", spec_.name);
  const Place& place = places_.at(static_cast<std::size_t>(i));
  const auto element = static_cast<std::int64_t>(size_of(options_.compute));
  if (vectors_ && place.vector >= 0) return at<char>(vectors_, place.vector * element);
  wait_for_gather();
  const std::int64_t offset = (place.frozen ? frozen_ : trainable_).offset(place.index) * element;
  if (!replicated()) return at<char>(place.frozen ? full_.frozen : full_.trainable, offset);
  if (rounded()) return at<char>(place.frozen ? frozen_replica_ : replica_, offset);
  return at<char>(place.frozen ? frozen_values_ : values_, offset);
}

void ShardUnit::keep_vectors() {
  if (vectors_ || vector_elements_ == 0) return;
  wait_for_gather();
  const Allocator::Asking asking(device_.memory, spec_.name);
  const auto element = static_cast<std::int64_t>(size_of(options_.compute));
  vectors_ = Buffer(device_.memory, vector_elements_ * element, Tag::Gathered);
  for (std::size_t i = 0; i < places_.size(); ++i) {
    const Place& place = places_[i];
    if (place.vector < 0) continue;
    const std::int64_t offset = (place.frozen ? frozen_ : trainable_).offset(place.index);
    device_.copy(Stream::Compute, at<char>(vectors_, place.vector * element),
                 at<char>(place.frozen ? full_.frozen : full_.trainable, offset * element),
                 spec_.params[i].shape.numel() * element);
  }
}

void ShardUnit::evict(Then then) {
  check(leases_ == 0, "{}: evicted while leased", spec_.name);
  if (replicated()) return;  // it stays, and so does the refresh that may be on its way
  if (then == Then::Done) vectors_ = {};
  if (then == Then::UsedAgain && full_) keep_vectors();
  // The device, and the transport, may still write to a copy that nobody waited for.
  if (full_ && !waited_ && !device_.meta()) {
    device_.wait(Stream::Compute, full_.placed);  // memory is freed in the order of compute
    orphans_.push_back(std::move(full_));
  }
  full_ = {};
  waited_ = false;
}

void ShardUnit::finish_gathers() {
  for (const Copy& copy : orphans_) device_.wait(Stream::Compute, copy.arrival);
  orphans_.clear();
}

void ShardUnit::parameters_changed() {
  if (!replicated()) return evict();
  check(leases_ == 0, "{}: parameters changed while leased", spec_.name);
  if (!has_trainable()) return;
  device_.wait(Stream::Gather, device_.record(Stream::Compute));
  if (rounded())
    device_.round(Stream::Gather, at<Bf16>(replica_, whole() ? 0 : trainable_.shard() * comm_.rank()),
                  values_.data<float>(), local_elements(trainable_));
  if (options_.strategy == Strategy::None) return;
  const GatherBuffer buffer{rounded() ? replica_.data() : values_.data(), trainable_.shard(), options_.compute};
  full_.arrival = comm_.all_gather(std::span(&buffer, 1), label(Pass::Optimizer));
  waited_ = false;
}

void ShardUnit::finish_refresh() {
  if (!replicated()) return;
  device_.wait(Stream::Compute, full_.arrival);
  device_.wait(Stream::Compute, device_.record(Stream::Gather));
  full_.arrival = {};
}

Buffer ShardUnit::whole_values(Part part, Pass pass) {
  const Allocator::Asking asking(device_.memory, spec_.name);
  const FlatLayout& of = layout(part);
  const Buffer& mine = part == Part::Frozen ? frozen_values_ : values_;
  Buffer all(device_.memory, of.padded() * kFloat, Tag::Gathered);
  const std::int64_t begin = whole() ? 0 : of.shard() * comm_.rank();
  device_.wait(Stream::Gather, device_.record(Stream::Compute));
  device_.copy(Stream::Gather, at(all, begin), mine.data(), mine.bytes());
  device_.wait(Stream::Compute, device_.record(Stream::Gather));
  if (!whole()) {
    const GatherBuffer buffer{all.data(), of.shard(), DType::F32};
    device_.wait(Stream::Compute, comm_.all_gather(std::span(&buffer, 1), label(pass)));
  }
  return all;
}

// ---- gradients ------------------------------------------------------------------------------------------------------

void ShardUnit::begin_step() {
  finish_gathers();
  finish_reduction();  // of a step that was abandoned: it adds to what is zero from here on
  std::fill(written_.begin(), written_.end(), false);
  device_.zero(Stream::Compute, gradient_.data(), gradient_.bytes());
  if (running_) running_->clear(device_);
}

UnitGradients& ShardUnit::gradients(Tag lifetime) {
  if (running_stays() && reducing_) finish_reduction();  // there is one buffer, and it is still being reduced
  if (!running_) {
    const Allocator::Asking asking(device_.memory, spec_.name);
    std::vector<std::int64_t> offsets;
    for (const Place& place : places_) offsets.push_back(place.frozen ? -1 : trainable_.offset(place.index));
    running_.emplace(device_, std::move(offsets), trainable_.padded(), running_stays() ? Tag::Gradients : lifetime);
  }
  return *running_;
}

void ShardUnit::reduce() {
  if (!has_trainable()) return;
  check(running_.has_value(), "{}: reduced without gradients", spec_.name);
  finish_reduction();
  for (std::size_t i = 0; i < places_.size(); ++i)
    if (running_->trainable(static_cast<int>(i)) && running_->written(static_cast<int>(i))) written_[i] = true;
  device_.wait(Stream::Reduce, device_.record(Stream::Compute));
  if (device_.trace) device_.trace->line("reduce " + spec_.name);
  if (options_.strategy == Strategy::None)
    reduced_ = comm_.all_reduce(running_->flat(), trainable_.shard(), label(Pass::Backward));
  else
    reduced_ =
        comm_.reduce_scatter(running_->flat(), gradient_.data<float>(), trainable_.shard(), label(Pass::Backward));
  reducing_ = std::move(running_);
  running_.reset();
}

void ShardUnit::finish_reduction() {
  if (!reducing_) return;
  device_.wait(Stream::Compute, reduced_);
  reduced_ = {};
  if (options_.strategy == Strategy::None && gradient_)
    device_.add(Stream::Compute, gradient_.data<float>(), gradient_.data<float>(), reducing_->flat(),
                reducing_->elements());
  if (running_stays()) {
    running_ = std::move(reducing_);
    if (options_.strategy == Strategy::Optimizer) running_->clear(device_);
  }
  reducing_.reset();
}

void ShardUnit::abandon_step() noexcept {
  running_.reset();
  abandon_copies();
}

void ShardUnit::abandon_copies() noexcept {
  try {
    evict();
  } catch (...) {  // of a device that has failed: the error that is on its way is the one to report
  }
}

// ---- what the optimizer sees ----------------------------------------------------------------------------------------

float* ShardUnit::owned_gradient() const {
  if (gradient_) return gradient_.data<float>();
  return running_ ? running_->flat() : nullptr;
}

std::vector<ShardUnit::OwnedPiece> ShardUnit::pieces_of(int rank, std::int64_t value_begin, std::int64_t gradient_begin,
                                                        std::int64_t state_begin) const {
  std::vector<OwnedPiece> out;
  float* gradient = owned_gradient();
  for (const FlatLayout::Piece& p : trainable_.pieces(rank))
    out.push_back({trainable_params_[p.param], p.first, p.size, state_begin + p.offset,
                   at(values_, value_begin + p.offset), gradient ? gradient + gradient_begin + p.offset : nullptr});
  return out;
}

std::vector<ShardUnit::OwnedPiece> ShardUnit::normed() const {
  const std::int64_t begin = options_.strategy == Strategy::None ? own_begin() : 0;  // in what is kept whole
  return pieces_of(comm_.rank(), own_begin(), begin, begin);
}

std::vector<ShardUnit::OwnedPiece> ShardUnit::updated() const {
  if (options_.strategy != Strategy::None) return normed();
  std::vector<OwnedPiece> all;
  for (int rank = 0; rank < comm_.size(); ++rank) {
    const std::int64_t begin = trainable_.shard() * rank;
    std::ranges::move(pieces_of(rank, begin, begin, begin), std::back_inserter(all));
  }
  return all;
}

std::int64_t ShardUnit::state_elements() const {
  return options_.strategy == Strategy::None ? trainable_.padded() : trainable_.shard();
}

}  // namespace regather
