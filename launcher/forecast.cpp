#include "launcher/forecast.h"

#include <algorithm>
#include <deque>
#include <map>

#include "launcher/run_device.h"
#include "launcher/training_run.h"

namespace regather {
namespace {

// Peaks between one call and the next, and over all of them.
class Peaks {
 public:
  explicit Peaks(Allocator& memory) : memory_(memory) { memory_.restart_peaks(); }
  struct Since {
    std::int64_t activations, all;
  };
  Since take(StepForecast& f) {
    const Since since{memory_.peak(Tag::Activations), memory_.peak_total()};
    if (since.all > f.peak) {
      f.peak = since.all;
      f.at_peak = memory_.at_peak();
    }
    for (Tag tag : kAllTags) f.peak_of[index(tag)] = std::max(f.peak_of[index(tag)], memory_.peak(tag));
    memory_.restart_peaks();
    return since;
  }

 private:
  Allocator& memory_;
};

// Transfers on one link, one after the other, beside what is computed. The plan says what each action waits for: the
// units it gathers; and a reduction ends before the next but one begins.
class Link {
 public:
  explicit Link(double bytes_a_second) : bandwidth_(bytes_a_second) {}
  void compute(double seconds) { now_ += seconds; }
  void gather(const std::string& unit, double bytes) { arrival_[unit] = send(bytes); }
  void await(const std::string& unit) {
    if (const auto at = arrival_.find(unit); at != arrival_.end()) until(at->second);
  }
  void reduce(double bytes) {
    reductions_.push_back(send(bytes));
    if (reductions_.size() > 1) {
      until(reductions_.front());
      reductions_.pop_front();
    }
  }
  double finish() {
    for (double end : reductions_) until(end);
    for (const auto& [unit, end] : arrival_) until(end);
    return waited_;
  }

 private:
  double send(double bytes) { return free_ = std::max(free_, now_) + bytes / bandwidth_; }
  void until(double time) {
    waited_ += std::max(0.0, time - now_);
    now_ = std::max(now_, time);
  }
  double bandwidth_, now_ = 0, free_ = 0, waited_ = 0;
  std::map<std::string, double> arrival_;
  std::deque<double> reductions_;
};

// Where the recorder was when each action began.
struct Mark {
  std::size_t interval, flight;
};

bool is_reduction(const Recorder::Flight& f) { return f.name.starts_with(name_of(Collective::ReduceScatter)); }

void add_reruns(StepForecast::Moment& moment, std::span<const Recorder::Interval> intervals, const CostModel* costs) {
  for (const Recorder::Interval& i : intervals) {
    if (costs) moment.seconds += costs->seconds(i);
    if (i.activity != Recorder::Activity::Recompute) continue;
    moment.reruns.push_back(i.detail.empty() ? i.name : i.detail);
    if (costs) moment.rerun_seconds += costs->seconds(i);
  }
}

double seconds_on_link(const Recorder& recorder, const std::vector<Mark>& marks, const StepPlan& plan,
                       const Model& model, const CostModel& costs, double bandwidth) {
  Link link(bandwidth);
  const auto& flights = recorder.recording().flights;
  const auto compute = [&](std::size_t from, std::size_t to) {
    for (std::size_t i = from; i < to; ++i) link.compute(costs.seconds(recorder.recording().intervals[i]));
  };
  const auto transfer = [&](const Recorder::Flight& f) {
    is_reduction(f) ? link.reduce(f.bytes) : link.gather(f.detail, f.bytes);
  };
  for (std::size_t i = 0; i < marks.front().flight; ++i) transfer(flights[i]);
  compute(0, marks.front().interval);
  for (std::size_t t = 0; t + 1 < marks.size(); ++t) {
    const auto begin = flights.begin() + static_cast<std::ptrdiff_t>(marks[t].flight),
               end = flights.begin() + static_cast<std::ptrdiff_t>(marks[t + 1].flight);
    for (auto f = begin; f != end; ++f)
      if (!is_reduction(*f)) transfer(*f);
    for (int unit : plan.entries[t].acquires) link.await(model.units[static_cast<std::size_t>(unit)].name);
    compute(marks[t].interval, marks[t + 1].interval);
    for (auto f = begin; f != end; ++f)
      if (is_reduction(*f)) transfer(*f);
  }
  for (std::size_t i = marks.back().flight; i < flights.size(); ++i) transfer(flights[i]);
  compute(marks.back().interval, recorder.recording().intervals.size());
  return link.finish();
}

// Copies in each direction one after the other, beside what is computed; an action ends when what leaves with it has
// arrived on the host, and begins when what it reads is back.
double seconds_stalled(const std::vector<StepForecast::Moment>& moments, const StepPlan& plan, const CostModel& costs) {
  std::map<std::pair<int, int>, std::int64_t> bytes;  // of a block and micro-batch
  std::map<std::pair<int, int>, double> away, back;
  double now = 0, out_free = 0, in_free = 0, stalled = 0;
  const auto until = [&](double time) {
    stalled += std::max(0.0, time - now);
    now = std::max(now, time);
  };
  for (std::size_t t = 0; t < moments.size(); ++t) {
    const StepForecast::Moment& m = moments[t];
    const std::pair<int, int> own{m.action.part, m.action.micro_batch};
    for (const StepPlan::Visit& v : plan.entries[t].fetches) {
      const std::pair<int, int> visit{v.block, v.micro_batch};
      in_free = std::max(in_free, now) + costs.copy_seconds(Stream::ToDevice, static_cast<double>(bytes[visit]));
      back[visit] = in_free;
    }
    if (m.action.pass == Pass::Backward && back.contains(own)) until(back[own]);
    now += m.seconds;
    if (m.moved > 0) {
      bytes[own] = m.moved;
      out_free = std::max(out_free, now) + costs.copy_seconds(Stream::ToHost, static_cast<double>(m.moved));
      away[own] = out_free;
    }
    for (const StepPlan::Visit& v : plan.entries[t].leaves)
      if (const auto arrived = away.find({v.block, v.micro_batch}); arrived != away.end()) until(arrived->second);
  }
  return stalled;
}

StepForecast::Seconds price(const Recorder& recorder, const CostModel& costs) {
  StepForecast::Seconds seconds;
  std::size_t operations = 0;
  for (const Recorder::Interval& i : recorder.recording().intervals) {
    if (!is_operation(i)) continue;
    ++operations;
    using enum Recorder::Activity;
    double& part = i.activity == Forward     ? seconds.forward
                   : i.activity == Recompute ? seconds.recompute
                   : i.activity == Backward  ? seconds.backward
                   : i.activity == Update    ? seconds.update
                                             : seconds.copy;
    part += costs.seconds(i);
  }
  seconds.overhead = costs.overhead_seconds(operations);
  return seconds;
}

}  // namespace

StepForecast forecast_step(const Config& config, const Model& model, int rank, int world,
                           const ForecastOptions& options) {
  CpuDevice device(Allocator::Mode::Meta, options.memory_limit, kind_of_device(config));
  const auto comm = make_dry_communicator(rank, world);
  StepForecast forecast;
  Peaks peaks(device.memory);
  Trainer trainer(model, device, *comm, trainer_options(config));
  const Shape shape{config.train.micro_batch, config.data.sequence};
  std::vector<Batch> batches;
  for (std::int64_t m = 0; m < config.train.accumulation; ++m)
    batches.push_back({Tensor(device.memory, shape, Tag::Workspace, DType::I32),
                       Tensor(device.memory, shape, Tag::Workspace, DType::I32), 0});
  // Buffers that live from the first backward on are there at the peak of the second step.
  trainer.step(batches);
  peaks.take(forecast);

  Recorder recorder;
  record_into(&recorder, device);
  comm->set_recorder(&recorder);
  std::vector<Mark> marks;
  const auto& entries = trainer.stack().plan().entries;
  std::int64_t live = 0, moved = 0;
  std::map<std::pair<int, int>, std::int64_t>
      moved_of;  // block and micro-batch -> bytes on their way, or in host memory
  trainer.stack().before_action = [&](std::size_t t) {
    const Peaks::Since since = peaks.take(forecast);
    const std::int64_t now = device.memory.live(Tag::Activations), away = trainer.stack().offloader().moved_bytes();
    if (t == 0) {
      forecast.outside = since.all;
    } else {
      StepForecast::Moment& moment = forecast.moments.emplace_back(
          StepForecast::Moment{entries[t - 1].action, since.activations, since.all, now - live, away - moved});
      for (const StepPlan::Visit& v : entries[t - 1].leaves) moment.kept += moved_of[{v.block, v.micro_batch}];
      moved_of[{moment.action.part, moment.action.micro_batch}] = moment.moved;
      add_reruns(moment, std::span(recorder.recording().intervals).subspan(marks.back().interval), options.costs);
    }
    live = now;
    moved = away;
    marks.push_back({recorder.recording().intervals.size(), recorder.recording().flights.size()});
  };
  StepReport report = trainer.step(batches);
  record_into(nullptr, device);
  comm->set_recorder(nullptr);
  report.looked_at_each =
      false;  // as in all steps but the first ones; the ledger of this one was compared with its plan
  forecast.collectives = trainer.expected(report);
  for (const auto& [key, counts] : forecast.collectives) forecast.wire_bytes += counts.wire_bytes;
  if (config.eval.every > 0 && config.eval.every <= config.train.steps)
    trainer.evaluate(std::span<const Batch>(batches).first(1));
  forecast.outside = std::max(forecast.outside, peaks.take(forecast).all);
  forecast.forward_flops = report.forward_flops;
  forecast.recomputed_flops = report.recomputed_flops;
  if (options.costs) {
    forecast.seconds = price(recorder, *options.costs);
    forecast.seconds.stalled = seconds_stalled(forecast.moments, trainer.stack().plan(), *options.costs);
    forecast.seconds.communication =
        options.bandwidth > 0
            ? seconds_on_link(recorder, marks, trainer.stack().plan(), model, *options.costs, options.bandwidth)
            : options.costs->communication_seconds(static_cast<double>(forecast.wire_bytes));
  }
  return forecast;
}

}  // namespace regather
