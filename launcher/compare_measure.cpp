#include "launcher/compare_measure.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "launcher/calibrate.h"
#include "launcher/config_value.h"
#include "launcher/keep_plan.h"
#include "launcher/machine.h"
#include "launcher/run_device.h"
#include "launcher/timeline_recorder.h"
#include "tensor/host_view.h"

namespace regather {
namespace {

using Json = nlohmann::json;

double half_range(const std::vector<double>& values) {
  const SecondsSummary s = summarize_seconds(values);
  return s.median > 0 ? (s.max - s.min) / 2 / s.median : 0;
}

// Infinite if one of them is not a number and the other one differs.
double difference(double a, double b) {
  if (std::memcmp(&a, &b, sizeof a) == 0) return 0;
  const double d = std::abs(a - b);
  return std::isfinite(d) ? d : std::numeric_limits<double>::infinity();
}
// JSON has no infinity.
Json spelled(double value) { return std::isfinite(value) ? Json(value) : Json("infinite"); }
double number(const Json& json) {
  return json.is_number() ? json.get<double>() : std::numeric_limits<double>::infinity();
}

// "10.8 M"
std::string human_count(std::int64_t n) {
  const auto value = static_cast<double>(n);
  if (n >= 1'000'000'000) return fmt::format("{:.1f} G", value / 1e9);
  if (n >= 1'000'000) return fmt::format("{:.1f} M", value / 1e6);
  return n >= 1'000 ? fmt::format("{:.1f} k", value / 1e3) : fmt::format("{}", n);
}

Json to_json(const MemoryPeak& peak) { return {peak.total, peak.at_peak, peak.peak_of}; }
MemoryPeak peak_from(const Json& json) {
  return {json.at(0).get<std::int64_t>(), json.at(1).get<BytesByTag>(), json.at(2).get<BytesByTag>()};
}

// Of the rank whose peak is largest; each kind's own peak is the largest over the ranks.
void combine(MemoryPeak& all, const MemoryPeak& one) {
  if (one.total > all.total) {
    all.total = one.total;
    all.at_peak = one.at_peak;
  }
  for (std::size_t t = 0; t < kNumTags; ++t) all.peak_of[t] = std::max(all.peak_of[t], one.peak_of[t]);
}

// Adds one round of a policy, as all ranks measured it.
void combine_ranks(PolicyResult& result, const std::vector<std::string>& of_ranks) {
  std::vector<double> slowest;
  for (const std::string& text : of_ranks) {
    const Json of_rank = Json::parse(text);
    combine(result.measured, peak_from(of_rank.at("peak")));
    result.resident_growth = std::max(result.resident_growth, of_rank.at("resident").get<std::int64_t>());
    const auto seconds = of_rank.at("seconds").get<std::vector<double>>();
    slowest.resize(seconds.size(), 0.0);
    for (std::size_t i = 0; i < slowest.size(); ++i) slowest[i] = std::max(slowest[i], seconds[i]);
    for (const auto& line : of_rank.at("differs").get<std::vector<std::string>>())
      if (std::ranges::find(result.communication_differs, line) == result.communication_differs.end())
        result.communication_differs.push_back(line);
    result.identical = result.identical && of_rank.at("identical").get<bool>();
    result.loss_difference = std::max(result.loss_difference, number(of_rank.at("loss")));
    result.gradient_difference = std::max(result.gradient_difference, number(of_rank.at("gradient")));
  }
  result.step_seconds.push_back(median(slowest));
  result.spreads.push_back(half_range(slowest));
}

// What policies measured after so many rounds, others did not.
void keep_rounds(Comparison& comparison, std::int64_t rounds) {
  if (rounds == 0)
    throw FoundByAllRanks("stopped by a signal before every policy was measured once: there is nothing to compare");
  comparison.rounds = rounds;
  for (PolicyResult& p : comparison.policies)
    if (p.ran()) {
      p.step_seconds.resize(static_cast<std::size_t>(rounds));
      p.spreads.resize(static_cast<std::size_t>(rounds));
    }
}

void conclude(Comparison& comparison) {
  for (PolicyResult& p : comparison.policies) {
    if (!p.ran()) continue;
    const PolicyResult& reference = comparison.policies[static_cast<std::size_t>(comparison.reference)];
    p.seconds = median(p.step_seconds);
    p.tokens_per_second = p.seconds > 0 ? static_cast<double>(p.tokens) / p.seconds : 0;
    p.spread = p.step_seconds.size() > 1 ? half_range(p.step_seconds) : p.spreads.front();
    std::vector<double> ratios;
    for (std::size_t r = 0; r < p.step_seconds.size(); ++r)
      if (reference.step_seconds[r] > 0) ratios.push_back(p.step_seconds[r] / reference.step_seconds[r]);
    p.slowdown = ratios.empty() ? 1 : median(ratios);
  }
}

}  // namespace

struct PolicyMeasurement::Attempt {
  Attempt(const Model& model, const Config& config, Communicator& comm, std::function<bool()> stop_asked)
      : run(take_run_device(config, comm, config.memory.limit)),
        trainer(model, *run.device, comm, options(config, std::move(stop_asked))) {}
  static TrainerOptions options(const Config& config, std::function<bool()> stop_asked) {
    TrainerOptions options = trainer_options(config);
    options.stop_asked = std::move(stop_asked);
    options.audit = TrainerOptions::Audit::Warn;  // a difference is a line of the table
    return options;
  }
  RunDevice run;
  Trainer trainer;
};

struct PolicyMeasurement::Differences {
  bool identical = true;
  double loss = 0, gradient = 0;
};

PolicyMeasurement::PolicyMeasurement(const Config& config, const CompareOptions& options, Communicator& comm, Say say,
                                     std::function<bool()> stop_asked)
    : config_(config),
      options_(options),
      comm_(comm),
      say_(std::move(say)),
      stop_asked_(std::move(stop_asked)),
      inputs_(config, comm.size()) {
  comm.set_where("start");
  require_same_on_all_ranks(comm, to_json(config), "configurations");
  require_same_on_all_ranks(
      comm, Json{{"--policies", options.policies}, {"--steps", options.steps}, {"--rounds", options.rounds}}.dump(),
      "options");
  require_same_on_all_ranks(comm, inputs_.identity(), "data");
}

PolicyMeasurement::~PolicyMeasurement() = default;

// A policy that will not fit is refused before it runs, by the same decision on every rank.
void PolicyMeasurement::plan(PolicyResult& result, const Config& config) {
  const StepForecast forecast = forecast_step(config, inputs_.model, comm_.rank(), comm_.size());
  const RunDevice here = make_run_device(config, comm_, 0);
  const Json mine = {here.memory_of, here.available,
                     to_json(MemoryPeak{forecast.peak, forecast.at_peak, forecast.peak_of})};
  std::map<std::string, std::int64_t> needs, available;
  for (const std::string& text : comm_.exchange(mine.dump())) {
    const Json of_rank = Json::parse(text);
    const MemoryPeak peak = peak_from(of_rank.at(2));
    combine(result.planned, peak);
    needs[of_rank.at(0)] += peak.total;
    available[of_rank.at(0)] = of_rank.at(1);
  }
  if (config.memory.limit > 0 && result.planned.total > config.memory.limit) {
    result.refused = fmt::format("does not fit: it needs {} of the {} that memory.limit allows",
                                 human_bytes(result.planned.total), human_bytes(config.memory.limit));
    return;
  }
  for (const auto& [place, bytes] : needs)
    if (available[place] > 0 && bytes > available[place])
      result.refused = fmt::format("does not fit: its ranks on {} need {} of the {} that are available", place,
                                   human_bytes(bytes), human_bytes(available[place]));
}

// Puts what was planned into the configuration; or the least there is, and returns why no plan is within memory.limit.
std::string PolicyMeasurement::settle(Config& config) {
  const CostModel costs = costs_for(config_, make_run_device(config_, comm_, 0), comm_);
  try {
    config = settled(config, inputs_.model, comm_.size(), costs);
  } catch (const FoundByAllRanks& e) {
    config = with_plan(config, {.blocks = std::vector(inputs_.model.blocks.size(), drop_all()), .slots = 1});
    return e.what();
  }
  return "";
}

void PolicyMeasurement::compare_losses(const std::vector<double>& losses, Differences& differences) {
  if (reference_losses_.empty()) reference_losses_ = losses;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    const double reference = reference_losses_.at(i);
    differences.identical = differences.identical && std::memcmp(&losses[i], &reference, sizeof reference) == 0;
    differences.loss = std::max(differences.loss, difference(losses[i], reference));
  }
}

// Called after the first step: gradients stay in the units until the next one begins.
void PolicyMeasurement::compare_gradients(Differences& differences) {
  std::size_t at = 0;
  for (const auto& unit : attempt_->trainer.stack().units())
    for (const ShardUnit::OwnedPiece& piece : unit->normed()) {
      const auto n = static_cast<std::size_t>(piece.size);
      const HostView<float> gradient(*attempt_->run.device, piece.gradient, piece.size);
      if (reference_losses_.empty()) {
        reference_gradients_.insert(reference_gradients_.end(), gradient.begin(), gradient.end());
        continue;
      }
      check(at + n <= reference_gradients_.size(), "a rank holds element {} of the gradient, and did not before",
            at + n - 1);
      const float* reference = reference_gradients_.data() + at;
      at += n;
      if (std::memcmp(gradient.data(), reference, n * sizeof(float)) == 0) continue;
      differences.identical = false;
      for (std::size_t i = 0; i < n; ++i)
        differences.gradient = std::max(differences.gradient, difference(static_cast<double>(gradient.data()[i]),
                                                                         static_cast<double>(reference[i])));
    }
}

// At least the third step: it communicates as all that follow would.
void PolicyMeasurement::record_a_step(PolicyResult& result) {
  const auto step = inputs_.batches(*attempt_->run.device, comm_.rank(), attempt_->trainer.steps_done());
  TimelineRecorder recorder(*attempt_->run.device);
  result.collectives = attempt_->trainer.step(step).collectives;
  result.timeline = recorder.timeline(inputs_.grid.accumulation == 1);
}

PolicyMeasurement::Measured PolicyMeasurement::measure(PolicyResult& result, const Config& config, std::int64_t round) {
  comm_.barrier({"scalars", Pass::Step});
  const std::int64_t resident_before = resident_memory().now;
  reset_peak_resident_memory();
  attempt_ = std::make_unique<Attempt>(inputs_.model, config, comm_, stop_asked_);

  StepReport report;
  Differences differences;
  std::vector<double> seconds, losses;
  std::vector<std::string> differs;
  for (std::int64_t step = 0; step <= options_.steps; ++step) {
    report = attempt_->trainer.step(inputs_.batches(*attempt_->run.device, comm_.rank(), step));
    if (attempt_->trainer.stop_asked()) return Measured::Stopped;
    losses.push_back(report.loss);
    differs.insert(differs.end(), report.audit.begin(), report.audit.end());
    if (step > 0) seconds.push_back(report.seconds);
    if (step == 0 && round == 0) compare_gradients(differences);
  }
  const Allocator& memory = attempt_->run.device->memory;
  const Json mine{{"peak", to_json(MemoryPeak{memory.peak_total(), memory.at_peak(), memory.peak_by_tag()})},
                  {"resident", resident_memory().peak - resident_before},
                  {"seconds", seconds},
                  {"differs", differs}};
  if (round == 0) {
    compare_losses(losses, differences);
    result.tokens = report.tokens;
    result.loss = losses.front();
    result.forward_flops = report.forward_flops;
    result.recomputed_flops = report.recomputed_flops;
    record_a_step(result);
  }
  Json all = mine;
  all["identical"] = differences.identical;
  all["loss"] = spelled(differences.loss);
  all["gradient"] = spelled(differences.gradient);
  combine_ranks(result, comm_.exchange(all.dump()));
  attempt_.reset();
  return Measured::All;
}

Comparison PolicyMeasurement::begin() const {
  Comparison c;
  c.name = options_.name;
  c.configuration = to_json(config_);
  c.world = comm_.size();
  c.steps = options_.steps;
  c.rounds = options_.rounds;
  c.memory_limit = config_.memory.limit;
  c.sharded = config_.sharding.strategy == ShardingConfig::Strategy::Full;
  c.resident_slots = config_.sharding.resident_slots;
  c.model = fmt::format("{}, {} layers, hidden {}, {} parameters", config_.model.type, config_.model.layers,
                        config_.model.hidden, human_count(inputs_.model.num_parameters()));
  c.batch = fmt::format("micro_batch {}{}, sequence {}", inputs_.grid.micro_batch,
                        inputs_.grid.accumulation > 1 ? fmt::format(" x {}", inputs_.grid.accumulation) : "",
                        config_.data.sequence);
  return c;
}

Comparison PolicyMeasurement::run() {
  Comparison comparison = begin();
  std::vector<Config> configs;
  for (const std::string& policy : options_.policies.empty() ? default_policies(config_) : options_.policies) {
    configs.push_back(with_policy(config_, policy));
    std::string unplanned;
    if (policy == "budget") unplanned = settle(configs.back());
    PolicyResult& result = comparison.policies.emplace_back();
    result.policy = policy;
    result.detail = describe_checkpointing(configs.back());
    plan(result, configs.back());
    if (!unplanned.empty() && result.ran()) result.refused = "does not fit: " + unplanned;
  }
  std::vector<std::size_t> order;  // what runs; first what the others are compared with
  for (std::size_t i = 0; i < configs.size(); ++i)
    if (comparison.policies[i].ran())
      order.insert(comparison.policies[i].policy == "none" ? order.begin() : order.end(), i);
  if (order.empty()) return comparison;
  comparison.reference = static_cast<int>(order.front());
  for (std::int64_t round = 0; round < comparison.rounds; ++round)
    for (const std::size_t i : order) {
      PolicyResult& result = comparison.policies[i];
      const Measured measured =
          with_context([&] { return "policy " + result.policy; }, [&] { return measure(result, configs[i], round); });
      if (measured == Measured::Stopped) {
        say_(fmt::format("stopped by a signal in round {}", round + 1));
        keep_rounds(comparison, round);
        break;
      }
      say_(fmt::format("round {}/{}  {:<16} {:.3f} s a step, {} at the peak", round + 1, options_.rounds, result.policy,
                       result.step_seconds.back(), human_bytes(result.measured.total)));
    }
  conclude(comparison);
  return comparison;
}

std::string policy_of(const Config& config) {
  Config copy = config;
  Keys keys = keys_of(copy);
  const Key& key = *keys.find("activation_checkpointing.policy");
  return key.options[std::get<ChoiceTarget>(key.target).get()].name;
}

Config with_policy(const Config& config, const std::string& policy) {
  Config copy = config;
  Keys keys = keys_of(copy);
  const Key& key = *keys.find("activation_checkpointing.policy");
  std::vector<std::string> available;
  for (std::size_t i = 0; i < key.options.size(); ++i) {
    if (!key.options[i].available) continue;
    available.push_back(key.options[i].name);
    if (key.options[i].name == policy) std::get<ChoiceTarget>(key.target).set(i);
  }
  if (std::ranges::find(available, policy) == available.end()) {
    const std::string near = nearest(policy, available);
    throw UsageError(fmt::format("--policies: value '{}' is not a policy; allowed: {}{}", policy,
                                 fmt::join(available, ", "), near.empty() ? "" : "; did you mean " + near + "?"));
  }
  // Left to the plan of policy budget; others have what is usual.
  if (policy != "budget" && copy.sharding.resident_slots == 0)
    copy.sharding.resident_slots = std::min(ShardingConfig().resident_slots, copy.model.layers);
  if (policy != "budget" && copy.activation_checkpointing.offload.planned()) copy.activation_checkpointing.offload = {};
  with_context([&] { return "--policies " + policy; }, [&] { validate(copy); });
  return copy;
}

std::vector<std::string> default_policies(const Config& config) {
  std::vector<std::string> policies = {"none", "full", "every_n_layers", "segments"};
  const std::string own = policy_of(config);
  if (std::ranges::find(policies, own) == policies.end()) policies.push_back(own);
  return policies;
}

}  // namespace regather
