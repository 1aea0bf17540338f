#include "dist/shard_unit.h"

#include <algorithm>

#include "tensor/trace.h"

namespace regather {
namespace {

constexpr auto kFloat = static_cast<std::int64_t>(sizeof(float));

FlatLayout layout_of(const std::vector<ParamInfo>& params, bool trainable, int world) {
  std::vector<std::int64_t> sizes;
  for (const ParamInfo& p : params)
    if (p.trainable == trainable) sizes.push_back(p.shape.numel());
  return {sizes, world};
}

float* at(const Buffer& buffer, std::int64_t offset) {
  float* data = buffer.data<float>();
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
    if (!frozen) trainable_params_.push_back(static_cast<int>(i));
  }
  const Allocator::Asking asking(device_.memory, spec_.name);
  values_ = Buffer(device_.memory, local_elements(trainable_) * kFloat, Tag::Parameters);
  frozen_values_ = Buffer(device_.memory, local_elements(frozen_) * kFloat, Tag::Parameters);
  const bool whole = options_.strategy == Strategy::None;
  // With one reduction a step, data parallel ranks reduce the running buffer in place.
  if (!whole || options_.reductions_per_step > 1)
    gradient_ = Buffer(device_.memory, (whole ? trainable_.padded() : trainable_.shard()) * kFloat, Tag::Gradients);
  if (!device_.meta()) fill_start_values();
}

void ShardUnit::fill_start_values() {
  for (const bool frozen : {false, true}) {
    const Buffer& values = frozen ? frozen_values_ : values_;
    const FlatLayout& layout = frozen ? frozen_ : trainable_;
    std::vector<float> made(device_.gpu() ? static_cast<std::size_t>(local_elements(layout)) : 0);
    float* const data = device_.gpu() ? made.data() : values.data<float>();
    std::fill_n(data, local_elements(layout), 0.0F);
    std::vector<int> table_index;
    for (std::size_t i = 0; i < places_.size(); ++i)
      if (places_[i].frozen == frozen) table_index.push_back(static_cast<int>(i));
    for (int rank = 0; rank < comm_.size(); ++rank) {
      if (!replicated() && rank != comm_.rank()) continue;
      float* shard = data + (replicated() ? layout.shard() * rank : 0);
      for (const FlatLayout::Piece& piece : layout.pieces(rank))
        initialize(spec_.params[static_cast<std::size_t>(table_index[piece.param])], options_.seed, piece.first,
                   piece.size, shard + piece.offset);
    }
    if (device_.gpu()) device_.write(Stream::Compute, values.data(), data, values.bytes());
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
    Buffer slot(device_.memory, layout.padded() * kFloat, Tag::Gathered);
    // It is there, and what was enqueued before no longer reads it, or writes the values.
    device_.wait(Stream::Gather, device_.record(Stream::Compute));
    device_.copy(Stream::Gather, at(slot, layout.shard() * comm_.rank()), shard.data(), shard.bytes());
    buffers.push_back({slot.data(), layout.shard(), DType::F32});
    return slot;
  };
  copy.trainable = place(trainable_, values_);
  copy.frozen = place(frozen_, frozen_values_);
  copy.placed = device_.record(Stream::Gather);
  copy.arrival = comm_.all_gather(buffers, label(pass));
  full_ = std::move(copy);
  waited_ = false;
  if (device_.trace) device_.trace->line("gather " + spec_.name);
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
  if (vectors_ && place.vector >= 0) return at(vectors_, place.vector);
  wait_for_gather();
  const std::int64_t offset = (place.frozen ? frozen_ : trainable_).offset(place.index);
  if (replicated()) return at(place.frozen ? frozen_values_ : values_, offset);
  return at(place.frozen ? full_.frozen : full_.trainable, offset);
}

void ShardUnit::keep_vectors() {
  if (vectors_ || vector_elements_ == 0) return;
  wait_for_gather();
  const Allocator::Asking asking(device_.memory, spec_.name);
  vectors_ = Buffer(device_.memory, vector_elements_ * kFloat, Tag::Gathered);
  for (std::size_t i = 0; i < places_.size(); ++i) {
    const Place& place = places_[i];
    if (place.vector < 0) continue;
    const std::int64_t offset = (place.frozen ? frozen_ : trainable_).offset(place.index);
    device_.copy(Stream::Compute, at(vectors_, place.vector), at(place.frozen ? full_.frozen : full_.trainable, offset),
                 spec_.params[i].shape.numel() * kFloat);
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

void ShardUnit::parameters_changed() {
  if (!replicated()) return evict();
  check(leases_ == 0, "{}: parameters changed while leased", spec_.name);
  if (options_.strategy == Strategy::None || !has_trainable()) return;
  const GatherBuffer buffer{values_.data(), trainable_.shard(), DType::F32};
  device_.wait(Stream::Gather, device_.record(Stream::Compute));
  full_.arrival = comm_.all_gather(std::span(&buffer, 1), label(Pass::Optimizer));
  waited_ = false;
}

void ShardUnit::finish_refresh() {
  if (!replicated()) return;
  device_.wait(Stream::Compute, full_.arrival);
  full_.arrival = {};
}

// ---- gradients ------------------------------------------------------------------------------------------------------

void ShardUnit::begin_step() {
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

void ShardUnit::abandon_step() {
  running_.reset();
  reducing_.reset();
  reduced_ = {};
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
  const bool whole = options_.strategy == Strategy::None;
  return pieces_of(comm_.rank(), own_begin(), whole ? own_begin() : 0, whole ? own_begin() : 0);
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
