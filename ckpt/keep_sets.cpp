#include "ckpt/keep_sets.h"

#include <algorithm>
#include <map>
#include <memory>

#include "ckpt/marks.h"

namespace regather {
namespace {

using Types = std::vector<ValueType>;

Types types_of(const Activations& values) {
  Types types;
  for (const Tensor& t : values) types.push_back({t.shape(), t.dtype()});
  return types;
}

// One part of a model on storage-less tensors, again and again under other plans.
class DryPart {
 public:
  // wanted: whether gradients flow to what is before it.
  DryPart(const Model& model, const Part& part, Types inputs, Device& device, DType compute, bool wanted)
      : part_(part), inputs_(std::move(inputs)), device_(device), wanted_(wanted) {
    for (int unit : part.units) {
      const UnitSpec& spec = model.units.at(static_cast<std::size_t>(unit));
      sources_.push_back(std::make_unique<DescribedUnit>(spec, compute));
      params_.append(*sources_.back());
      std::vector<std::int64_t> offsets;
      for (const ParamInfo& p : spec.params) offsets.push_back(p.trainable ? 0 : -1);
      gradients_.push_back(std::make_unique<UnitGradients>(device, std::move(offsets), 0, Tag::Gradients));
      grads_.append(*gradients_.back(), static_cast<int>(spec.params.size()));
    }
  }

  // What each plan needs; reruns: priced, summed.
  KeepSet run(const SavePlan& plan, const Price& price) {
    KeepSet set{.plan = plan};
    Allocator& memory = device_.memory;
    const std::int64_t activations = memory.live(Tag::Activations), all = memory.live_total();
    const auto take_peaks = [&](std::int64_t BlockBytes::*moment) {
      set.activations.*moment = memory.peak(Tag::Activations) - activations;
      set.all.*moment = memory.peak_total() - all;
    };
    memory.restart_peaks();
    Tape tape(device_, plan);
    Activations y = forward(tape), dy;
    take_peaks(&BlockBytes::forward);
    for (const Tensor& t : y) dy.emplace_back(memory, t.shape(), Tag::Workspace, t.dtype());
    y.clear();  // it is the next block's input
    set.activations.kept = memory.live(Tag::Activations) - activations;
    set.all.kept = set.activations.kept;
    for (const Tape::ValueReport& v : tape.report())
      if (v.marked && v.state == ValueState::Kept && std::ranges::find(set.keep, v.name) == set.keep.end())
        set.keep.push_back(v.name);
    Recorder recorder;
    device_.recorder = &recorder;
    memory.restart_peaks();
    tape.backward(params_, std::move(dy), grads_);
    take_peaks(&BlockBytes::backward);
    device_.recorder = nullptr;
    for (const Recorder::Interval& i : recorder.recording().intervals) {
      if (i.activity != Recorder::Activity::Recompute) continue;
      set.seconds += price(i);
      set.flops += i.work.flops;
    }
    return set;
  }

  // What leaves the device when these values wait in host memory.
  std::int64_t leaving(const SavePlan& plan) {
    Offloader offloader(device_);
    Tape tape(device_, plan, {}, &offloader);
    forward(tape);
    const std::int64_t before = device_.memory.live(Tag::Activations);
    tape.leave();
    return before - device_.memory.live(Tag::Activations);
  }

  struct Description {
    std::string work;  // what runs, for telling blocks apart
    std::vector<std::string> marks;
    Types outputs;
  };
  Description describe() {
    Description d;
    Recorder recorder;
    device_.recorder = &recorder;
    Tape tape(device_, drop_all());
    Activations y = forward(tape), dy;
    d.outputs = types_of(y);
    for (const Tensor& t : y) dy.emplace_back(device_.memory, t.shape(), Tag::Workspace, t.dtype());
    y.clear();
    for (const Tape::ValueReport& v : tape.report()) {
      d.work += fmt::format("{} {} {}\n", v.name, v.bytes, v.saved);
      if (v.marked && std::ranges::find(d.marks, v.name) == d.marks.end()) d.marks.push_back(v.name);
    }
    tape.backward(params_, std::move(dy), grads_);
    device_.recorder = nullptr;
    for (const Recorder::Interval& i : recorder.recording().intervals)
      d.work += fmt::format("{} {} {} {}\n", static_cast<int>(i.activity), i.name, i.work.flops, i.work.bytes);
    return d;
  }
  // The types that it makes of its inputs.
  Types outputs() {
    const ParamView& params = params_;
    Run run{device_, params};
    return types_of(part_.block->forward(run, make_inputs()));
  }

 private:
  Activations make_inputs() {
    Activations x;
    for (const ValueType& type : inputs_)
      x.emplace_back(device_.memory, type.shape, type.dtype == DType::I32 ? Tag::Workspace : Tag::Activations,
                     type.dtype);
    return x;
  }
  Activations forward(Tape& tape) {
    Activations x = make_inputs();
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = tape.input(std::move(x[i]), wanted_ && part_.block->differentiable(i));
    Run run{device_, params_, &tape};
    Activations y = part_.block->forward(run, x);
    x.clear();
    tape.outputs(y);
    return y;
  }

  const Part& part_;
  Types inputs_;
  Device& device_;
  bool wanted_;
  std::vector<std::unique_ptr<DescribedUnit>> sources_;
  std::vector<std::unique_ptr<UnitGradients>> gradients_;
  ParamView params_;
  Gradients grads_;
};

// Of `marks`, those in `keep` are kept and the others dropped. What has no mark is kept unless nothing is: it is small
// (one number a head and token of an attention), and its operation would be run again for its sake alone; but for what
// is cheap.
SavePlan plan_that_keeps(const std::vector<std::string>& keep, const std::vector<std::string>& marks,
                         Placement unmarked, Order order) {
  SavePlan plan{.unmarked = unmarked, .cheap = Placement::Drop, .order = order};
  for (const std::string& mark : marks) plan.marks[mark] = Placement::Drop;
  for (const std::string& mark : keep) plan.marks[mark] = Placement::Keep;
  return plan;
}

// Does no worse in anything.
bool beats(const KeepSet& a, const KeepSet& b) {
  return a.activations.kept <= b.activations.kept && a.activations.forward <= b.activations.forward &&
         a.activations.backward <= b.activations.backward && a.all.forward <= b.all.forward &&
         a.all.backward <= b.all.backward && a.seconds <= b.seconds;
}

// The marks that are worth combining: keeping them saves something, alone or when everything else is kept.
std::vector<std::string> useful_marks(DryPart& block, const std::vector<std::string>& marks, const Price& price) {
  struct Mark {
    std::string name;
    double worth;  // seconds a byte, alone
  };
  const auto run = [&](const std::vector<std::string>& keep) {
    return block.run(plan_that_keeps(keep, marks, Placement::Keep, Order::Lazy), price);
  };
  const KeepSet nothing = run({}), everything = run(marks);
  std::vector<Mark> useful;
  for (const std::string& mark : marks) {
    std::vector<std::string> others;
    std::ranges::copy_if(marks, std::back_inserter(others), [&](const std::string& m) { return m != mark; });
    const KeepSet alone = run({mark}), without = run(others);
    const double saved = nothing.seconds - alone.seconds;
    if (saved <= 0 && without.seconds <= everything.seconds) continue;
    const auto bytes = static_cast<double>(alone.activations.kept - nothing.activations.kept);
    useful.push_back({mark, saved / std::max(1.0, bytes)});
  }
  if (useful.size() > kMarksCombined) {
    std::ranges::stable_sort(useful, std::ranges::greater{}, &Mark::worth);
    useful.resize(kMarksCombined);
  }
  std::vector<std::string> names;
  for (const std::string& mark : marks)  // in the order in which the block makes them
    if (std::ranges::find(useful, mark, &Mark::name) != useful.end()) names.push_back(mark);
  return names;
}

void find_movable(DryPart& block, KeepSet& set) {
  std::vector<std::string> names = set.keep;
  names.insert(names.begin(), std::string(kInput));
  for (const std::string& name : names)
    if (const std::int64_t bytes = block.leaving(with_move(set.plan, {{name}})); bytes > 0)
      set.movable.emplace_back(name, bytes);
  std::ranges::stable_sort(set.movable, std::ranges::greater{}, &std::pair<std::string, std::int64_t>::second);
  if (set.movable.size() > kMovableCombined) set.movable.resize(kMovableCombined);
}

BlockKeepSets search(DryPart& block, const std::vector<std::string>& marks, Order order, const Price& price,
                     Movable movable) {
  BlockKeepSets found;
  const std::vector<std::string> useful = useful_marks(block, marks, price);
  std::vector<KeepSet> all;
  for (std::size_t bits = 0; bits < std::size_t{1} << useful.size(); ++bits) {
    std::vector<std::string> keep;
    for (std::size_t i = 0; i < useful.size(); ++i)
      if ((bits >> i) & 1U) keep.push_back(useful[i]);
    all.push_back(block.run(plan_that_keeps(keep, marks, Placement::Keep, order), price));
  }
  found.nothing = block.run(plan_that_keeps({}, marks, Placement::Drop, order), price);
  all.push_back(found.nothing);
  SavePlan costly = keep_costly();
  costly.order = order;
  found.whole = block.run(costly, price);
  std::erase_if(all, [&](const KeepSet& set) { return set.activations.kept > found.whole.activations.kept; });
  all.push_back(found.whole);
  // Fewer bytes first, then less time, then fewer marks: a set beats those behind it that are no better in anything.
  std::ranges::stable_sort(all, [](const KeepSet& a, const KeepSet& b) {
    if (a.activations.kept != b.activations.kept) return a.activations.kept < b.activations.kept;
    return a.seconds != b.seconds ? a.seconds < b.seconds : a.keep.size() < b.keep.size();
  });
  for (KeepSet& set : all)
    if (std::ranges::none_of(found.sets, [&](const KeepSet& other) { return beats(other, set); }))
      found.sets.push_back(std::move(set));
  if (movable == Movable::Asked)
    for (KeepSet& set : found.sets) find_movable(block, set);
  return found;
}

}  // namespace

SavePlan with_move(SavePlan plan, const Move& move) {
  for (const std::string& name : move.names) (name == kInput ? plan.inputs : plan.marks[name]) = Placement::Offload;
  return plan;
}

std::vector<Move> moves_of(const KeepSet& set, std::int64_t hidden) {
  std::map<std::int64_t, Move> sums;  // of the fewest values
  for (std::size_t bits = 1; bits < std::size_t{1} << set.movable.size(); ++bits) {
    Move move;
    for (std::size_t i = 0; i < set.movable.size(); ++i)
      if ((bits >> i) & 1U) {
        move.names.push_back(set.movable[i].first);
        move.bytes += set.movable[i].second;
      }
    Move& known = sums[move.bytes];
    if (known.names.empty() || move.names.size() < known.names.size()) known = std::move(move);
  }
  std::vector<Move> all, some;
  for (auto& [bytes, move] : sums) all.push_back(std::move(move));
  const auto beyond = std::ranges::upper_bound(all, hidden, {}, &Move::bytes);
  const auto free = static_cast<std::size_t>(beyond - all.begin());  // how many are
  for (std::size_t i = 0; i < all.size(); ++i) {
    const bool spread =
        all.size() <= kMovesOfASet || i * kMovesOfASet / all.size() != (i + 1) * kMovesOfASet / all.size();
    if (spread || i + 1 == free) some.push_back(std::move(all[i]));
  }
  return some;
}

std::vector<BlockKeepSets> keep_sets(const Model& model, const Shape& tokens, Order order, const Price& price,
                                     Movable movable, DType compute, DeviceKind kind) {
  CpuDevice device(Allocator::Mode::Meta, 0, kind);
  const auto trains = [&](const Part& part) {
    return std::ranges::any_of(part.units, [&](int unit) {
      return std::ranges::any_of(model.units[static_cast<std::size_t>(unit)].params, &ParamInfo::trainable);
    });
  };
  Types types = DryPart(model, model.embedding, {{tokens, DType::I32}}, device, compute, false).outputs();
  bool wanted = trains(model.embedding);
  std::vector<BlockKeepSets> all;
  std::map<std::string, std::size_t> known;  // what a block does -> where its sets are
  for (const Part& part : model.blocks) {
    DryPart block(model, part, types, device, compute, wanted);
    wanted = wanted || trains(part);
    const DryPart::Description d = block.describe();
    const auto [at, fresh] = known.try_emplace(d.work, all.size());
    all.push_back(fresh ? search(block, d.marks, order, price, movable) : all[at->second]);
    types = d.outputs;
  }
  return all;
}

}  // namespace regather
