#include "launcher/profile.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "launcher/machine.h"
#include "launcher/profile_report.h"
#include "launcher/run_device.h"
#include "launcher/trace_file.h"

namespace regather {
namespace {

using Json = nlohmann::json;
using Activity = Recorder::Activity;

constexpr std::chrono::milliseconds kMeasureEach{250};

double seconds(Recorder::Time time) { return std::chrono::duration<double>(time).count(); }

// Collectives have rows of their own, and a scope's own time is nothing by name.
std::string row_name(const Recorder::Interval& i) {
  if (i.activity == Activity::Wait) return "waiting";
  return i.activity == Activity::Scope ? "other" : i.name;
}

template <class Row, class Key, class Add>
void add_rows(std::vector<Row>& all, const std::vector<Row>& rows, Key key, Add add) {
  for (const Row& row : rows) {
    auto at = std::ranges::find_if(all, [&](const Row& r) { return key(r) == key(row); });
    if (at == all.end()) {
      all.push_back(row);
    } else {
      add(*at, row);
    }
  }
}

void add(ProfileRow& sum, const ProfileRow& row) {
  sum.calls += row.calls;
  sum.seconds += row.seconds;
  sum.work.flops += row.work.flops;
  sum.work.bytes += row.work.bytes;
  sum.least_seconds += row.least_seconds;
}
void add(CollectiveRow& sum, const CollectiveRow& row) {
  sum.calls += row.calls;
  sum.bytes += row.bytes;
  sum.flight_seconds += row.flight_seconds;
  sum.waited_seconds += row.waited_seconds;
}
void scale(RankProfile& p, double factor) {
  p.limits.flops *= factor;
  p.limits.bytes *= factor;
  p.seconds *= factor;
  p.step_seconds *= factor;
  for (ProfileRow& row : p.rows) {
    for (double* value : {&row.calls, &row.seconds, &row.work.flops, &row.work.bytes, &row.least_seconds})
      *value *= factor;
  }
  for (CollectiveRow& row : p.collectives) {
    for (double* value : {&row.calls, &row.bytes, &row.flight_seconds, &row.waited_seconds}) *value *= factor;
  }
}

}  // namespace

RankProfile mean_of_ranks(const Profile& profile) {
  RankProfile mean;
  for (const RankProfile& p : profile.ranks) {
    mean.limits.flops += p.limits.flops;
    mean.limits.bytes += p.limits.bytes;
    mean.seconds += p.seconds;
    mean.step_seconds += p.step_seconds;
    add_rows(
        mean.rows, p.rows, [](const ProfileRow& r) { return std::pair(r.activity, r.name); },
        [](ProfileRow& sum, const ProfileRow& row) { add(sum, row); });
    add_rows(
        mean.collectives, p.collectives, [](const CollectiveRow& r) { return r.name; },
        [](CollectiveRow& sum, const CollectiveRow& row) { add(sum, row); });
  }
  scale(mean, 1.0 / static_cast<double>(std::max<std::size_t>(1, profile.ranks.size())));
  return mean;
}

double waited_seconds(const RankProfile& profile) {
  double waited = 0;
  for (const ProfileRow& row : profile.rows)
    if (row.activity == Activity::Wait) waited += row.seconds;
  return waited;
}

// Ranks of one machine share its clock. The others' clocks are set by the barrier that all ranks leave together.
Profiler::Profiler(const RunDevice& run, DType compute, Communicator& comm) : device_(*run.device), comm_(comm) {
  comm.barrier({"scalars", Pass::Step});
  own_limits_ = limits_of(run, compute, kMeasureEach);
  comm.barrier({"scalars", Pass::Step});
  zero_ = Recorder::now();
  const Json mine = {host_name(), zero_.count(), own_limits_.flops, own_limits_.bytes};
  const std::vector<std::string> all = comm.exchange(mine.dump());
  for (const std::string& text : all) {
    const Json of_rank = Json::parse(text);
    limits_.flops += of_rank.at(2).get<double>() / static_cast<double>(all.size());
    limits_.bytes += of_rank.at(3).get<double>() / static_cast<double>(all.size());
  }
  const Json first = Json::parse(all.front());
  if (first.at(0) == mine.at(0)) zero_ = Recorder::Time(first.at(1).get<Recorder::Time::rep>());
}

Profiler::Window::Window(Profiler* profiler, std::int64_t step)
    : profiler_(step > kWarmUpSteps ? profiler : nullptr), whole_(profiler_ ? &profiler_->recorder_ : nullptr, [&] {
        return Recorder::Interval{Activity::Scope, "loop", std::to_string(step)};
      }) {
  if (!profiler_) return;
  record_into(&profiler_->recorder_, profiler_->device_);
  profiler_->comm_.set_recorder(&profiler_->recorder_);
}

Profiler::Window::~Window() {
  if (!profiler_) return;
  record_into(nullptr, profiler_->device_);
  profiler_->comm_.set_recorder(nullptr);
}

void Profiler::end_step(std::int64_t step) {
  if (step <= kWarmUpSteps) return;
  Recorder::Recording recording = recorder_.take();
  ++steps_;
  for (const Recorder::Interval& i : recording.intervals) {
    if (i.parent < 0) sums_.seconds += seconds(i.length);
    if (i.activity == Activity::Scope && i.name == "step") sums_.step_seconds += seconds(i.length);
    if (i.activity == Activity::Wait) collectives_[i.name].waited_seconds += seconds(i.own);
    const std::string name = row_name(i);
    add(rows_[{i.activity, name}], {i.activity, name, 1, seconds(i.own), i.work, least_seconds(i.work, own_limits_)});
  }
  for (const Recorder::Flight& f : recording.flights)
    add(collectives_[f.name], {f.name, 1, f.bytes, seconds(f.length), 0});
  if (traced_.size() < static_cast<std::size_t>(kTracedSteps)) traced_.push_back(std::move(recording));
}

std::optional<Profile> Profiler::profile() {
  RankProfile own = sums_;
  for (auto& [key, row] : rows_) {
    std::tie(row.activity, row.name) = key;
    own.rows.push_back(row);
  }
  for (auto& [name, row] : collectives_) {
    row.name = name;
    own.collectives.push_back(row);
  }
  scale(own, 1.0 / static_cast<double>(std::max<std::int64_t>(1, steps_)));
  own.limits = own_limits_;
  const std::vector<std::string> all = comm_.collect(to_json(own));
  if (comm_.rank() != 0) return std::nullopt;
  Profile profile{.steps = steps_, .ranks = {}};
  for (const std::string& text : all) profile.ranks.push_back(rank_profile_from_json(text));
  return profile;
}

std::optional<std::string> Profiler::trace() {
  const std::vector<std::string> all = comm_.collect(trace_events(comm_.rank(), traced_, zero_));
  if (comm_.rank() != 0) return std::nullopt;
  return trace_file(all);
}

}  // namespace regather
