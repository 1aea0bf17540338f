#include "launcher/keep_plan.h"

#include <algorithm>
#include <map>

#include "ckpt/step_plan.h"
#include "launcher/progress.h"
#include "launcher/ranks.h"
#include "launcher/training_run.h"

namespace regather {
namespace {

constexpr std::size_t kListed = 12;  // points of a frontier that are listed; all are considered
constexpr int kTries = 8;
constexpr std::size_t kMoveWork = 4'000'000;  // states times choices of all blocks, where values may be moved

// Tapes that are alive: those under a block's plan, and those that keep all that is costly: their backward comes first.
struct Tapes {
  int planned = 0, whole = 0;
};

// A moment at which the choice of a block matters.
struct Constraint {
  std::int64_t rest = 0;  // what is there beside this block's tapes and beside what earlier blocks keep
  Tapes others{};         // of this block, from other micro-batches
  bool whole = false, backward = false;
};

// A choice of a block, as it is carried out.
struct KeptAs {
  const KeepSet* set;
  Move move{};
};

// As good in everything.
bool beats(const KeepChoice& a, const KeepChoice& b) {
  return a.kept <= b.kept && a.moved <= b.moved && a.need <= b.need && a.seconds <= b.seconds;
}

// The problem that the planner solves, for the bytes of one kind or of all. What of a step does not depend on the
// choice (base: the step in which every block keeps nothing but its input) is found by taking from every moment of the
// step in which blocks keep their inputs only what those inputs, and the block that runs, need.
class Moments {
 public:
  // copies: what it costs to move values.
  Moments(const std::vector<BlockKeepSets>& sets, const StepForecast& base, Counted counted, const CostModel& copies)
      : sets_(sets),
        counted_(counted),
        copies_(copies),
        beside_(sets.size()),
        constraints_(sets.size()),
        alive_(sets.size()),
        planned_(sets.size(), 0) {
    if (counted == Counted::AllBytes) floor_ = base.outside;
    for (const StepForecast::Moment& m : base.moments) m.action.part >= 0 ? of_block(m) : of_root(m);
  }

  // as: what each choice is.
  KeepProblem problem(std::vector<std::vector<KeptAs>>& as) const {
    KeepProblem p{.blocks = {}, .head = head_};
    for (std::size_t b = 0; b < sets_.size(); ++b) {
      auto& choices = p.blocks.emplace_back();
      auto& kept_as = as.emplace_back();
      if (planned_[b] == 0) {  // its plan is never asked for
        choices.push_back(choice(b, sets_[b].whole));
        kept_as.push_back({&sets_[b].whole});
        continue;
      }
      for (const KeepSet& set : sets_[b].sets) {
        const KeepChoice stays = choice(b, set);
        choices.push_back(stays);
        kept_as.push_back({&set});
        if (set.movable.empty() || b + 1 == sets_.size()) continue;
        for (const Move& move : moves_of(set, hidden_bytes(b + 1))) {
          choices.push_back(moving(stays, b, move));
          kept_as.push_back({&set, move});
        }
      }
      drop_beaten(choices, kept_as);
    }
    // Nothing is kept before the first block: what the step needs there is needed whatever is chosen.
    for (KeepChoice& c : p.blocks.front()) c.need = std::max(c.need, floor_);
    return p;
  }

 private:
  static void drop_beaten(std::vector<KeepChoice>& choices, std::vector<KeptAs>& as) {
    if (std::ranges::none_of(as, [](const KeptAs& a) { return !a.move.names.empty(); })) return;
    std::vector<KeepChoice> left;
    std::vector<KeptAs> left_as;
    for (std::size_t i = 0; i < choices.size(); ++i) {
      bool beaten = false;
      for (std::size_t j = 0; j < choices.size() && !beaten; ++j)
        beaten = j != i && beats(choices[j], choices[i]) && (j < i || !beats(choices[i], choices[j]));
      if (beaten) continue;
      left.push_back(choices[i]);
      left_as.push_back(std::move(as[i]));
    }
    choices = std::move(left);
    as = std::move(left_as);
  }
  // What a block has beside its own operations to hide the copies of the block before it: its forward, and its backward
  // without what runs again, which its own choice may spare.
  struct Beside {
    double forward = 0, backward = 0;
  };
  std::int64_t hidden_bytes(std::size_t next) const {
    const double out = beside_[next].forward / copies_.copy_seconds(Stream::ToHost, 1),
                 back = beside_[next].backward / copies_.copy_seconds(Stream::ToDevice, 1);
    return static_cast<std::int64_t>(std::min({out, back, 1e18}));
  }
  KeepChoice moving(KeepChoice c, std::size_t b, const Move& move) const {
    const auto bytes = static_cast<double>(move.bytes);
    c.kept -= move.bytes;
    c.moved = move.bytes;
    c.seconds += planned_[b] * (std::max(0.0, copies_.copy_seconds(Stream::ToHost, bytes) - beside_[b + 1].forward) +
                                std::max(0.0, copies_.copy_seconds(Stream::ToDevice, bytes) - beside_[b + 1].backward));
    return c;
  }
  std::int64_t kept(std::size_t b, const Tapes& tapes, const KeepSet& set) const {
    return tapes.planned * set.activations.kept + tapes.whole * sets_[b].whole.activations.kept;
  }
  std::int64_t own(std::size_t b, const Constraint& c, const KeepSet& set) const {
    const KeepSet& here = c.whole ? sets_[b].whole : set;
    const BlockBytes& bytes = counted_ == Counted::ActivationBytes ? here.activations : here.all;
    return c.backward ? bytes.backward : bytes.forward;
  }
  KeepChoice choice(std::size_t b, const KeepSet& set) const {
    KeepChoice c{.kept = kept(b, at_head_[b], set), .seconds = planned_[b] * set.seconds};
    for (const Constraint& at : constraints_[b])
      c.need = std::max(c.need, at.rest + kept(b, at.others, set) + own(b, at, set));
    return c;
  }

  std::int64_t live(const StepForecast::Moment& m) const {
    return counted_ == Counted::ActivationBytes ? m.activations : m.all;
  }
  std::int64_t kept_by_all() const {
    std::int64_t sum = 0;
    for (std::size_t b = 0; b < sets_.size(); ++b) sum += kept(b, alive_[b], sets_[b].nothing);
    return sum;
  }
  void of_root(const StepForecast::Moment& m) {
    if (m.action.part != kHead) {
      floor_ = std::max(floor_, live(m));
      return;
    }
    head_ = std::max(head_, live(m) - kept_by_all());
    if (at_head_.empty()) at_head_ = alive_;  // in layer-major order, the first of them sees the most
  }
  void of_block(const StepForecast::Moment& m) {
    const Action& a = m.action;
    const auto b = static_cast<std::size_t>(a.part);
    Constraint c{.backward = a.pass == Pass::Backward};
    (c.backward ? beside_[b].backward : beside_[b].forward) = m.seconds - m.rerun_seconds;
    bool& whole = whole_[{a.part, a.micro_batch}];
    if (!c.backward) whole = a.keep_activations;
    c.whole = whole;
    int& count = whole ? alive_[b].whole : alive_[b].planned;
    if (c.backward) --count;
    c.others = alive_[b];
    c.rest = live(m) - kept_by_all() - own(b, c, sets_[b].nothing);
    constraints_[b].push_back(c);
    if (!c.backward) ++count;
    if (c.backward && !whole) ++planned_[b];
  }

  const std::vector<BlockKeepSets>& sets_;
  Counted counted_;
  const CostModel& copies_;
  std::vector<Beside> beside_;
  std::int64_t head_ = 0, floor_ = 0;
  std::vector<std::vector<Constraint>> constraints_;
  std::vector<Tapes> alive_, at_head_;
  std::map<std::pair<int, int>, bool> whole_;  // (block, micro-batch)
  std::vector<int> planned_;                   // backwards of a step that run under the block's plan
};

// One search: its sets, the frontier, and what of a step's time does not depend on the choice.
class Search {
 public:
  Search(const Config& config, const Model& model, int world, const CostModel& costs, Counted counted)
      : config_(config), model_(model), world_(world), costs_(costs), counted_(counted) {
    const Order order = checkpoint_order(config).value_or(Order::Lazy);
    sets_ = keep_sets(
        model, {config.train.micro_batch, config.data.sequence}, order,
        [&](const Recorder::Interval& i) { return costs.seconds(i) + costs.overhead_seconds(1); },
        config.activation_checkpointing.offload.planned() ? Movable::Asked : Movable::NotAsked,
        config.precision.element(), kind_of_device(config));
    std::vector<SavePlan> nothing;
    for (const BlockKeepSets& of_block : sets_) nothing.push_back(of_block.nothing.plan);
    if (config.sharding.resident_slots > 0)
      first_slots_ = static_cast<int>(config.sharding.resident_slots);
    else if (config.sharding.strategy != ShardingConfig::Strategy::Full)  // there is none: as where it is not written
      first_slots_ = static_cast<int>(std::min(ShardingConfig().resident_slots, config.model.layers));
    base_ = forecast(nothing, first_slots_);
    problem_ = Moments(sets_, base_, counted, costs).problem(as_);
    frontier_.emplace(problem_, states());
    std::size_t reruns = 0;
    for (const StepForecast::Moment& m : base_.moments) reruns += m.reruns.size();
    other_seconds_ = base_.seconds.total() - base_.seconds.recompute - costs.overhead_seconds(reruns);
    plan_slots_of();
  }

  StepForecast forecast(std::vector<SavePlan> blocks, int slots) const {
    return forecast_step(with_plan(config_, {.blocks = std::move(blocks), .slots = slots}), model_, 0, world_,
                         {.costs = &costs_});
  }
  std::int64_t peak(const StepForecast& f) const {
    return counted_ == Counted::ActivationBytes ? f.peak_of[index(Tag::Activations)] : f.peak;
  }

  // The fastest that is within so many bytes when it is run, not only when it is planned.
  std::optional<KeepPlan> within(std::int64_t limit) const {
    std::int64_t target = limit;
    for (int i = 0; i < kTries; ++i) {
      const auto best = plan_slots(*frontier_, slots_, target - without_slots_);
      if (!best) return std::nullopt;
      KeepPlan plan = describe(*best, limit);
      const std::int64_t excess = peak(forecast(plan.blocks, plan.slots)) - limit;
      if (excess <= 0) return plan;
      target -= excess;
    }
    return std::nullopt;
  }

  // What the plan that needs least needs, when it is run.
  std::int64_t least() const { return peak(forecast(plans(0), fewest_slots())); }

  KeepPlan describe(const ResidentPlan& best, std::int64_t limit) const {
    KeepPlan plan{.blocks = plans(best.point),
                  .slots = slots_.bytes_per_slot > 0 ? best.slots : first_slots_,
                  .counted = counted_,
                  .limit = limit};
    const auto& points = frontier_->points();
    std::vector<std::size_t> listed;
    for (std::size_t i = 0; i < kListed; ++i) listed.push_back(i * (points.size() - 1) / (kListed - 1));
    listed.push_back(best.point);
    std::ranges::sort(listed);
    listed.erase(std::unique(listed.begin(), listed.end()), listed.end());
    for (const std::size_t i : listed) {
      if (i == best.point) plan.chosen = plan.frontier.size();
      plan.frontier.push_back(point(i, best.slots));
    }
    return plan;
  }

 private:
  int fewest_slots() const { return slots_.bytes_per_slot > 0 ? 1 : first_slots_; }

  std::vector<SavePlan> plans(std::size_t point) const {
    std::vector<SavePlan> blocks;
    const std::vector<int> choices = frontier_->choices(point);
    for (std::size_t b = 0; b < sets_.size(); ++b)
      blocks.push_back(with_move(chosen(b, choices[b]).set->plan, chosen(b, choices[b]).move));
    return blocks;
  }
  const KeptAs& chosen(std::size_t b, int choice) const { return as_[b][static_cast<std::size_t>(choice)]; }
  // Fewer, where there are more choices: a plan is to be made in a second.
  std::size_t states() const {
    if (!config_.activation_checkpointing.offload.planned()) return KeepFrontier::kStates;
    std::size_t choices = 0;
    for (const auto& of_block : problem_.blocks) choices += of_block.size();
    return std::clamp<std::size_t>(kMoveWork / choices, 256, KeepFrontier::kStates);
  }
  KeepPlan::Point point(std::size_t i, int slots) const {
    const KeepFrontier::Point& p = frontier_->points()[i];
    KeepPlan::Point out{p.bytes + without_slots_ + slots_.bytes_per_slot * slots,
                        other_seconds_ + p.seconds + slots_.seconds[static_cast<std::size_t>(slots) - 1], 0, 0, 0};
    const std::vector<int> choices = frontier_->choices(i);
    for (std::size_t b = 0; b < sets_.size(); ++b) {
      const KeepSet& set = *chosen(b, choices[b]).set;
      out.host += chosen(b, choices[b]).move.bytes;
      const std::int64_t kept = set.activations.kept;
      ++(kept >= sets_[b].whole.activations.kept     ? out.everything
         : kept <= sets_[b].nothing.activations.kept ? out.inputs_only
                                                     : out.partly);
    }
    return out;
  }

  // Slots are part of the plan if the configuration leaves them to it. Seconds are beside those of the base step.
  void plan_slots_of() {
    slots_.seconds = {0};
    if (config_.sharding.resident_slots > 0 || config_.sharding.strategy != ShardingConfig::Strategy::Full) return;
    PartUnits units;
    const auto element = static_cast<std::int64_t>(size_of(config_.precision.element()));
    std::int64_t largest = 0;  // a unit, whole; of a slot that is given up, the vectors stay
    for (const Part& block : model_.blocks) {
      units.blocks.push_back(block.units);
      std::int64_t trainable = 0, frozen = 0, vectors = 0;
      for (const ParamInfo& p : model_.units[static_cast<std::size_t>(block.units[0])].params) {
        (p.trainable ? trainable : frozen) += p.shape.numel();
        if (p.shape.ndim() == 1) vectors += p.shape.numel();
      }
      const auto padded = [&](std::int64_t n) { return (n + world_ - 1) / world_ * world_; };
      const std::int64_t whole = padded(trainable) + padded(frozen);
      largest = std::max(largest, whole * element);
      slots_.bytes_per_slot = std::max(slots_.bytes_per_slot, (whole - vectors) * element);
    }
    without_slots_ = -slots_.bytes_per_slot * first_slots_;
    const double wire = static_cast<double>(largest) * (world_ - 1) / world_;
    StepPlanOptions options = trainer_options(with_plan(config_, {.blocks = plans(0), .slots = first_slots_})).plan;
    slots_.seconds.clear();
    double first = 0;
    for (int d = 1; d <= static_cast<int>(model_.blocks.size()); ++d) {
      options.slots = d;
      const int gathers = make_step_plan(units, static_cast<int>(model_.units.size()), options).block_gathers();
      slots_.seconds.push_back(costs_.communication_seconds(wire) * gathers);
      if (d == first_slots_) first = slots_.seconds.back();
    }
    for (double& s : slots_.seconds) s -= first;
  }

  const Config& config_;
  const Model& model_;
  int world_;
  const CostModel& costs_;
  Counted counted_;
  int first_slots_ = 1;
  std::vector<BlockKeepSets> sets_;
  StepForecast base_;
  KeepProblem problem_;
  std::vector<std::vector<KeptAs>> as_;  // of each block and choice
  std::optional<KeepFrontier> frontier_;
  SlotProblem slots_;
  std::int64_t without_slots_ = 0;
  double other_seconds_ = 0;
};

}  // namespace

KeepPlan make_keep_plan(const Config& config, const Model& model, int world, const CostModel& costs) {
  const std::int64_t budget = config.activation_checkpointing.budget;
  const bool everything = budget == 0;
  const std::int64_t limit = everything ? config.memory.limit : budget;
  const Search search(config, model, world, costs, everything ? Counted::AllBytes : Counted::ActivationBytes);
  std::optional<KeepPlan> plan = search.within(limit);
  if (plan) return std::move(*plan);
  const std::int64_t least = search.least();
  const std::string why =
      fmt::format("{}: value {} is not enough for {} of a rank, whatever is recomputed; allowed: {} ({} bytes) or more",
                  everything ? "memory.limit" : "activation_checkpointing.budget", human_bytes(limit),
                  everything ? "all the memory" : "the activations", at_least_bytes(least), least);
  if (everything) throw FoundByAllRanks(why, ExitCode::OutOfMemory);  // as under any policy
  throw UsageError(why);
}

KeepPlan explore_keep_plans(const Config& config, const Model& model, int world, const CostModel& costs) {
  Config own = config;
  own.sharding.resident_slots = std::max<std::int64_t>(1, own.sharding.resident_slots);
  if (own.activation_checkpointing.offload.on()) own.activation_checkpointing.offload = {};  // no part of any plan
  KeepPlan plan = Search(own, model, world, costs, Counted::ActivationBytes).describe({}, 0);
  plan.chosen = plan.frontier.size();
  return plan;
}

Config settled(const Config& config, const Model& model, int world, const CostModel& costs) {
  if (config.activation_checkpointing.policy != "budget") return config;
  return with_plan(config, make_keep_plan(config, model, world, costs));
}

Config with_plan(const Config& config, const KeepPlan& plan) {
  Config planned = config;
  planned.activation_checkpointing.policy = "budget";
  planned.activation_checkpointing.planned = plan.blocks;
  planned.sharding.resident_slots = plan.slots;
  return planned;
}

}  // namespace regather
