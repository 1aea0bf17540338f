// One unit's parameters on one rank: its shard (or replica), the full copy while it is resident, its gradients until
// they are reduced. The only all-gather of parameters in the project is started here.
//
//             prefetch()                first use of a parameter
//   Sharded ------------> Gathering -----------------------------> Ready
//      ^       acquire() does this too        evict(), parameters_changed(): only without leases
//      +------------------------------------------------------------+
//
// A unit that is evicted and used again in the same step leaves its 1-D parameters (norm gains, biases) behind, so that
// what reads no other parameter runs while the next gather is in flight. They are gathered with the others all the
// same.
//
// Strategies other than Full keep a replica of the parameters: it is always resident, and parameters_changed()
// refreshes it. What the optimizer updates is fp32, always; operations read elements of options.compute. Where the two
// differ, values are rounded on their way into the full copy, so that what is gathered is rounded already; gradients
// are added and reduced in fp32. The pass is stated by the caller, never inferred. It knows no block, no schedule and
// no checkpoint; whoever schedules the slots says when to evict.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "dist/communicator.h"
#include "dist/flat_layout.h"
#include "tensor/block.h"

namespace regather {

// What is sharded over the ranks. Full: parameters, gradients, optimizer state (ZeRO-3, Rajbhandari et al., SC 2020).
// Gradients: gradients and optimizer state (ZeRO-2). Optimizer: optimizer state (ZeRO-1). None: nothing (data
// parallel).
enum class Strategy { Full, Gradients, Optimizer, None };

struct UnitOptions {
  Strategy strategy = Strategy::Full;
  std::uint64_t seed = 1;
  int reductions_per_step = 1;  // how often the step's plan reduces this unit
  DType compute = DType::F32;   // or BF16: elements of the full parameters
};

class ShardUnit final : public ParamSource {
 public:
  class Lease {  // proof that the full parameters are (or will be) resident; move-only
   public:
    Lease(Lease&& other) noexcept : unit_(std::exchange(other.unit_, nullptr)) {}
    Lease& operator=(Lease&&) = delete;
    ~Lease() {
      if (unit_) --unit_->leases_;
    }

   private:
    friend class ShardUnit;
    explicit Lease(ShardUnit& unit) : unit_(&unit) { ++unit.leases_; }
    ShardUnit* unit_;
  };

  // ledger_name: what its collectives are counted under ("block" for every block).
  ShardUnit(UnitSpec spec, std::string ledger_name, Device& device, Communicator& comm, const UnitOptions& options);
  // With a collective in flight, as after an exception, its communicator fails: see Communicator::give_up().
  ~ShardUnit() override;
  ShardUnit(const ShardUnit&) = delete;
  ShardUnit& operator=(const ShardUnit&) = delete;

  // ---- parameters
  void prefetch(Pass pass);
  Lease acquire(Pass pass);
  enum class Then { Done, UsedAgain };  // in this step: the 1-D parameters stay until the unit is evicted for good
  void evict(Then then = Then::Done);
  void finish_gathers();      // of copies that were evicted in flight
  void parameters_changed();  // after the optimizer: full copies are stale; replicas start to be refreshed
  void finish_refresh();
  bool resident() const { return replicated() || static_cast<bool>(full_); }
  bool in_flight() const { return !waited_ && !full_.arrival.done(); }  // its gather, if nobody has waited for it
  const std::vector<ParamInfo>& table() const override { return spec_.params; }
  const void* data(int i) override;
  DType dtype() const override { return options_.compute; }
  // The parameters of one part whole and in fp32, the trainable as the optimizer has them, to be saved: value i of the
  // table is at offset(i) of part_of(i). Gathered where they are sharded, and waited for.
  enum class Part { Trainable, Frozen };
  Buffer whole_values(Part part, Pass pass);
  Part part_of(int i) const { return places_.at(static_cast<std::size_t>(i)).frozen ? Part::Frozen : Part::Trainable; }
  std::int64_t offset(int i) const { return layout(part_of(i)).offset(places_[static_cast<std::size_t>(i)].index); }

  // ---- gradients
  void begin_step();  // gradients are zero again, and nothing is in flight of a step that was abandoned
  // The buffer that backwards of this unit add to until the next reduce(). lifetime: Workspace if it is reduced at the
  // end of the same action, Gradients if it outlives it.
  UnitGradients& gradients(Tag lifetime);
  void reduce();  // starts the reduction of that buffer; at most one in flight
  void finish_reduction();
  // After a step that failed; neither waits nor throws. No gradients and no full copy stay behind, but a reduction in
  // flight keeps its buffer until the next step begins, and a device that has failed keeps its copies.
  void abandon_step() noexcept;
  void abandon_copies() noexcept;  // the same of an evaluation, which has no gradients
  bool written(int i) const { return written_[static_cast<std::size_t>(i)]; }  // in this step, by any backward

  // ---- what this rank's optimizer sees
  struct OwnedPiece {
    int param;           // index in the table
    std::int64_t first;  // of its elements within the parameter
    std::int64_t size;
    std::int64_t state;  // where its elements begin in the optimizer state of this unit
    float* value;        // null in a meta run, as the gradient
    float* gradient;
  };
  std::vector<OwnedPiece> updated() const;  // the trainable elements that this rank updates
  std::vector<OwnedPiece> normed() const;   // every trainable element on exactly one rank
  std::int64_t state_elements() const;

  const std::string& name() const { return spec_.name; }
  const std::string& ledger_name() const { return ledger_name_; }
  const FlatLayout& layout(Part part) const { return part == Part::Frozen ? frozen_ : trainable_; }
  bool has_trainable() const { return trainable_.total() > 0; }
  Strategy strategy() const { return options_.strategy; }
  // Are the values that the optimizer updates kept whole on every rank? With rounded replicas only where each rank
  // updates all of them.
  bool whole() const { return options_.strategy == Strategy::None || (replicated() && options_.compute == DType::F32); }

 private:
  bool replicated() const { return options_.strategy != Strategy::Full; }
  // Is the buffer that backwards add to kept for the whole run? (Gradients are not sharded.)
  bool running_stays() const {
    return options_.strategy == Strategy::Optimizer || (options_.strategy == Strategy::None && !gradient_);
  }
  bool rounded() const { return options_.compute != DType::F32; }
  std::int64_t local_elements(const FlatLayout& layout) const { return whole() ? layout.padded() : layout.shard(); }
  std::int64_t own_begin() const { return whole() ? trainable_.shard() * comm_.rank() : 0; }
  void fill_start_values();
  void wait_for_gather();
  void keep_vectors();
  void fill(const FlatLayout& layout, const std::vector<int>& params, int rank, float* shard) const;
  void make_replica(const FlatLayout& layout, const std::vector<int>& params, const Buffer& values, Buffer& replica);
  Buffer slot_with(const FlatLayout& layout, const Buffer& values);
  std::vector<OwnedPiece> pieces_of(int rank, std::int64_t value_begin, std::int64_t gradient_begin,
                                    std::int64_t state_begin) const;
  float* owned_gradient() const;
  Label label(Pass pass) const { return {ledger_name_, pass, spec_.name}; }

  struct Place {
    bool frozen;
    std::size_t index;         // in its layout
    std::int64_t vector = -1;  // where it begins in vectors_, in elements; -1: not 1-D
  };
  UnitSpec spec_;
  std::string ledger_name_;
  Device& device_;
  Communicator& comm_;
  UnitOptions options_;
  std::vector<Place> places_;
  FlatLayout trainable_, frozen_;
  std::int64_t vector_elements_ = 0;
  std::vector<int> trainable_params_, frozen_params_;  // layout index -> table index
  Buffer values_, frozen_values_;                      // fp32: this rank's shard, or all of them: see whole()
  Buffer replica_, frozen_replica_;                    // rounded, if replicated
  Buffer gradient_;                                    // reduced: of the shard; of everything for Strategy::None
  std::optional<UnitGradients> running_;               // what backwards add to
  std::optional<UnitGradients> reducing_;              // in flight
  Event reduced_;
  std::vector<bool> written_;

  struct Copy {  // a full copy and its gather
    Buffer trainable, frozen;
    Event placed, arrival;  // this rank's part, all parts
    explicit operator bool() const { return static_cast<bool>(trainable) || static_cast<bool>(frozen); }
  };
  Copy full_;
  Buffer vectors_;             // the 1-D parameters, one after the other, while they stay behind
  std::vector<Copy> orphans_;  // evicted while their gather was in flight
  bool waited_ = false;
  int leases_ = 0;
};

}  // namespace regather
