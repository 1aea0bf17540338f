#include "launcher/training_run.h"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <set>

#include "launcher/adapter_file.h"
#include "launcher/calibrate.h"
#include "launcher/keep_plan.h"
#include "launcher/machine.h"
#include "launcher/profile_report.h"

namespace regather {
namespace {

// The largest of each value over the ranks.
std::vector<std::int64_t> largest_over_ranks(Communicator& comm, const std::vector<std::int64_t>& mine) {
  std::vector<std::int64_t> largest = mine;
  for (const std::string& text : comm.exchange(nlohmann::json(mine).dump())) {
    const auto of_rank = nlohmann::json::parse(text).get<std::vector<std::int64_t>>();
    for (std::size_t i = 0; i < largest.size(); ++i) largest[i] = std::max(largest[i], of_rank.at(i));
  }
  return largest;
}

// counts: bytes and nanoseconds to the host, the same back, nanoseconds stalled; of the whole run.
OffloadSummary offload_summary(std::span<const std::int64_t> counts, std::int64_t steps) {
  const auto speed = [](std::int64_t bytes, std::int64_t nanoseconds) {
    return nanoseconds > 0 ? static_cast<double>(bytes) / static_cast<double>(nanoseconds) : 0.0;
  };
  OffloadSummary s;
  s.bytes = counts[0] / steps;
  s.to_host = speed(counts[0], counts[1]);
  s.to_device = speed(counts[2], counts[3]);
  s.stalled_milliseconds = static_cast<double>(counts[4]) / 1e6 / static_cast<double>(steps);
  return s;
}

}  // namespace

void require_same_on_all_ranks(Communicator& comm, const std::string& mine, std::string_view what) {
  const std::vector<std::string> all = comm.exchange(mine);
  std::string text;
  const auto first = nlohmann::json::parse(all[0]).flatten();
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const auto other = nlohmann::json::parse(all[rank]).flatten();
    for (const auto& [pointer, value] : first.items()) {
      if (other.contains(pointer)) continue;
      std::string key = pointer.substr(1);
      std::ranges::replace(key, '/', '.');
      text += fmt::format("\n  {}: {} on rank 0, nothing on rank {}", key, value.dump(), rank);
    }
    for (const auto& [pointer, value] : other.items()) {
      if (first.contains(pointer) && first[pointer] == value) continue;
      std::string key = pointer.substr(1);
      std::ranges::replace(key, '/', '.');
      text += fmt::format("\n  {}: {} on rank 0, {} on rank {}", key,
                          first.contains(pointer) ? first[pointer].dump() : "nothing", value.dump(), rank);
    }
  }
  if (!text.empty()) throw UsageError(fmt::format("the ranks were started with different {}:{}", what, text));
}

TrainerOptions trainer_options(const Config& config) {
  TrainerOptions options;
  options.checkpoint = checkpoint_plan(config);
  options.plan.micro_batches = static_cast<int>(config.train.accumulation);
  options.plan.slots = static_cast<int>(config.sharding.resident_slots);
  options.plan.order = config.train.accumulation_order == TrainConfig::AccumulationOrder::LayerMajor
                           ? AccumulationOrder::LayerMajor
                           : AccumulationOrder::BatchMajor;
  options.plan.reduce =
      config.train.reduce == TrainConfig::Reduce::Once ? ReduceWhen::Once : ReduceWhen::EachMicroBatch;
  switch (config.sharding.strategy) {
    case ShardingConfig::Strategy::Full: options.strategy = Strategy::Full; break;
    case ShardingConfig::Strategy::Gradients: options.strategy = Strategy::Gradients; break;
    case ShardingConfig::Strategy::Optimizer: options.strategy = Strategy::Optimizer; break;
    case ShardingConfig::Strategy::None: options.strategy = Strategy::None; break;
  }
  options.prefetch = static_cast<int>(config.sharding.prefetch_blocks());
  const OptimizerConfig& opt = config.train.optimizer;
  options.optimizer = {
      .type = opt.type == OptimizerConfig::Type::Sgd ? OptimizerOptions::Type::Sgd : OptimizerOptions::Type::AdamW,
      .beta1 = opt.betas[0],
      .beta2 = opt.betas[1],
      .eps = opt.eps,
      .weight_decay = opt.weight_decay};
  options.learning_rate = {.shape = config.train.schedule.type == ScheduleConfig::Type::Constant
                                        ? LearningRate::Shape::Constant
                                        : LearningRate::Shape::Cosine,
                           .peak = opt.lr,
                           .min = config.train.schedule.min_lr,
                           .warmup_steps = config.train.schedule.warmup_steps,
                           .steps = config.train.steps};
  options.clip_grad_norm = config.train.clip_grad_norm;
  options.nonfinite = config.train.nonfinite == TrainConfig::Nonfinite::Skip ? TrainerOptions::Nonfinite::Skip
                                                                             : TrainerOptions::Nonfinite::Error;
  options.audit = config.communication.audit == CommunicationConfig::Audit::Warn ? TrainerOptions::Audit::Warn
                                                                                 : TrainerOptions::Audit::Error;
  options.seed = static_cast<std::uint64_t>(config.train.seed);
  options.compute = config.precision.element();
  options.audit_recompute = config.activation_checkpointing.audit;
  return options;
}

TrainingRun::TrainingRun(const Config& config, const TrainOptions& options, const StopSignal& stop, Communicator& comm)
    : config_(config), options_(options), comm_(comm), inputs_(config, comm.size()) {
  comm_.set_where("start");
  require_same_on_all_ranks(comm, to_json(config), "configurations");
  require_same_on_all_ranks(comm, inputs_.identity(), "data");
  run_device_ = take_run_device(config, comm, config.memory.limit);
  const CostModel costs = costs_for(config, run_device_, comm);
  config_ = settled(config, inputs_.model, comm.size(), costs);
  forecast_ = forecast_step(config_, inputs_.model, comm.rank(), comm.size(), {.costs = &costs});
  if (config.memory.limit > 0)
    require_memory(config, speaks() ? forecast_ : forecast_step(config_, inputs_.model, 0, comm.size()), comm.size());
  const auto existing = options.overwrite ? RunFolder::Existing::Overwrite : RunFolder::Existing::Refuse;
  if (speaks()) RunFolder::require_usable(config.output, existing);
  const auto places = comm.exchange(nlohmann::json{host_name(), allowed_cpus()}.dump());
  if (options.profile) profiler_ = std::make_unique<Profiler>(run_device_, config.precision.element(), comm);
  if (speaks()) {
    progress_ = std::make_unique<Progress>(stdout, terminal_of(stdout), config.train.steps);
    speak_banner(places);
  }
  baseline_resident_ = resident_memory().now;
  reset_peak_resident_memory();
  TrainerOptions trainer = trainer_options(config_);
  trainer.stop_asked = [&stop] { return stop.received(); };
  trainer_ = std::make_unique<Trainer>(inputs_.model, device(), comm, trainer);
  if (speaks()) {  // only now, so that a run that could not begin leaves nothing behind
    folder_ = std::make_unique<RunFolder>(config.output, existing);
    folder_->write_config(config_);
    metrics_ = std::make_unique<MetricsLog>(*folder_);
  }
}

// places: of each rank, its machine and the CPUs that it may run on.
void TrainingRun::speak_banner(const std::vector<std::string>& places) {
  RunBanner banner;
  banner.ranks = comm_.size();
  banner.threads = config_.threads;
  banner.cpus = static_cast<std::int64_t>(allowed_cpus().size());
  banner.host = host_name();
  if (device().kind() == DeviceKind::Cuda)
    banner.device = fmt::format("cuda: {} ({})", run_device_.name, run_device_.memory_of);
  banner.ranks_here = 0;
  std::set<int> cpus_here;
  for (const std::string& text : places) {
    const auto place = nlohmann::json::parse(text);
    if (place.at(0) != banner.host) continue;
    ++banner.ranks_here;
    for (const auto& cpu : place.at(1)) cpus_here.insert(cpu.get<int>());
  }
  banner.cpus_here = static_cast<std::int64_t>(cpus_here.size());
  banner.parameters = parameter_counts(inputs_.model);
  if (profiler_) banner.limits = describe_limits(profiler_->limits());
  banner.memory = describe_needs(forecast_);
  if (config_.memory.limit == 0)
    banner.memory_warning = warn_of_memory(forecast_.peak, run_device_.sharing,
                                           device().kind() == DeviceKind::Cpu ? "this machine" : run_device_.memory_of,
                                           run_device_.available);
  progress_->banner(start_banner(config_, banner));
}

std::vector<Batch> TrainingRun::batches(std::int64_t step) {
  const Timed timed(device().recorder, [] { return Recorder::Interval{.name = "data"}; });
  return inputs_.batches(device(), comm_.rank(), step - 1);
}

void TrainingRun::run() {
  const std::int64_t end =
      config_.train.stop_after > 0 ? std::min(config_.train.stop_after, config_.train.steps) : config_.train.steps;
  bool stopped = false;
  for (std::int64_t step = 1; step <= end && !stopped; ++step) {
    {
      const Profiler::Window window(profiler_.get(), step);
      train_step(step);
    }
    if (profiler_) profiler_->end_step(step);
    if (config_.eval.every > 0 && step % config_.eval.every == 0) evaluate(step);
    stopped = trainer_->stop_asked();
  }
  if (config_.model.lora.rank > 0) write_adapter();
  const RunSummary summary = summarize();
  if (speaks()) {
    progress_->finish();
    folder_->write_summary(summary);
    if (!options_.json_file.empty()) write_file(options_.json_file, to_json(summary));
  }
  if (!summary.expected_matches) note_differences_of_others();
  if (profiler_) report_profile();
  if (speaks())
    progress_->note(end_line(summary, stopped ? RunEnd::Signal : RunEnd::AsAsked, folder_->file(RunFolder::kSummary)));
  if (summary.skipped_steps == summary.steps)
    throw FoundByAllRanks(fmt::format(
        "train.nonfinite: all {} steps were skipped, because a loss or gradient of each was not finite: nothing was "
        "trained",
        summary.steps));
}

// Rank 0 says its own at once, and those of the others, which it does not see, at the end.
void TrainingRun::note_differences(const std::vector<std::string>& lines) {
  for (const std::string& line : lines) {
    if (speaks()) progress_->note("communication differs from the plan: " + line);
    if (std::ranges::find(differed_, line) == differed_.end()) differed_.push_back(line);
  }
}

void TrainingRun::note_differences_of_others() {
  const std::vector<std::string> of_ranks = comm_.collect(nlohmann::json(differed_).dump());
  for (std::size_t rank = 1; rank < of_ranks.size(); ++rank)
    for (const auto& line : nlohmann::json::parse(of_ranks[rank]).get<std::vector<std::string>>())
      progress_->note(fmt::format("communication of rank {} differs from the plan: {}", rank, line));
}

void TrainingRun::report_profile() {
  const std::optional<Profile> profile = profiler_->profile();
  const std::optional<std::string> trace = profiler_->trace();
  if (!profile || !trace) return;
  write_file(folder_->file(RunFolder::kProfile), to_json(*profile));
  write_file(folder_->file(RunFolder::kTrace), *trace);
  progress_->note(profile->steps > 0 ? profile_tables(*profile) : "profile: stopped before any step was recorded");
  progress_->note(fmt::format("profile: {} and {} (for ui.perfetto.dev)", folder_->file(RunFolder::kProfile).string(),
                              folder_->file(RunFolder::kTrace).string()));
}

void TrainingRun::train_step(std::int64_t step) {
  StepReport report = trainer_->step(batches(step));
  const Timed timed(device().recorder, [] { return Recorder::Interval{.name = "report"}; });
  if (speaks()) {
    StepMetrics m;
    m.step = step;
    m.loss = report.loss;
    m.grad_norm = report.grad_norm;
    m.lr = report.lr;
    m.tokens = report.tokens;
    m.seconds = report.seconds;
    m.peak_bytes = device().memory.peak_total();
    for (const auto& [key, counts] : report.collectives) m.wire_bytes += counts.wire_bytes;
    m.skipped = report.skipped;
    metrics_->append(m);
    progress_->step(m);
  }
  note_differences(report.audit);
  if (!reports_.empty()) reports_.back().collectives.clear();  // only the last step's are reported
  reports_.push_back(std::move(report));
}

void TrainingRun::evaluate(std::int64_t step) {
  const auto begin = std::chrono::steady_clock::now();
  const RunInputs& in = inputs_;
  const EvaluationReport report = trainer_->evaluate(in.data.evaluation_batches(in.grid), [&](std::int64_t i) {
    return in.data.evaluation_batch(device(), in.grid, comm_.rank(), i);
  });
  note_differences(report.audit);
  if (!speaks()) return;
  const EvalMetrics m{step, report.loss,
                      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()};
  evaluations_.push_back(m);
  metrics_->append(m);
  progress_->evaluation(m);
}

void TrainingRun::write_adapter() {
  comm_.set_where("writing the adapter");
  comm_.reset_ledger();
  std::vector<NamedTensor> tensors = gather_adapters(trainer_->stack(), device(), comm_);
  note_differences(trainer_->audit(expected_of_adapters(trainer_->stack(), comm_.size()), "writing the adapter"));
  if (speaks())
    write_adapters(folder_->file(RunFolder::kAdapter), std::move(tensors), inputs_.model, config_.model.lora);
}

RunSummary TrainingRun::summarize() {
  RunSummary s;
  s.config = config_;
  s.world = comm_.size();
  s.device = run_device_.name;
  s.steps = static_cast<std::int64_t>(reports_.size());
  std::vector<double> seconds;
  for (const StepReport& r : reports_) {
    if (r.step > 1 || reports_.size() == 1) seconds.push_back(r.seconds);  // the first one warms up
    s.skipped_steps += r.skipped ? 1 : 0;
    s.loss.push_back(r.loss);
    s.grad_norm.push_back(r.grad_norm);
  }
  s.evaluations = evaluations_;
  s.step_seconds = summarize_seconds(seconds);
  const StepReport& last = reports_.back();
  s.tokens_per_second = s.step_seconds.median > 0 ? static_cast<double>(last.tokens) / s.step_seconds.median : 0;
  s.collectives_per_step = last.collectives;

  std::vector<std::int64_t> mine{device().memory.peak_total(), resident_memory().peak, baseline_resident_,
                                 forecast_.peak, differed_.empty() ? 0 : 1};
  for (Tag tag : kAllTags) mine.push_back(device().memory.at_peak()[index(tag)]);
  for (Tag tag : kAllTags) mine.push_back(device().memory.peak(tag));
  const auto nanoseconds = [](double time) { return static_cast<std::int64_t>(time * 1e9); };
  const CopyCounts out = device().copies(Stream::ToHost), back = device().copies(Stream::ToDevice);
  for (const std::int64_t n : {out.bytes, nanoseconds(out.seconds), back.bytes, nanoseconds(back.seconds),
                               nanoseconds(trainer_->stack().offloader().stalled_seconds())})
    mine.push_back(n);
  const auto largest = largest_over_ranks(comm_, mine);
  s.memory.peak = largest[0];
  s.memory.peak_rss = largest[1];
  s.memory.baseline_rss = largest[2];
  s.predicted.peak_bytes = largest[3];
  s.predicted.step_seconds = forecast_.seconds.total();
  s.expected_matches = largest[4] == 0;
  for (std::size_t t = 0; t < kNumTags; ++t) {
    s.memory.at_peak[t] = largest[5 + t];
    s.memory.peak_of[t] = largest[5 + kNumTags + t];
  }
  s.checkpointing.offload = offload_summary(std::span(largest).subspan(5 + 2 * kNumTags), s.steps);
  s.checkpointing.offload.host_bytes = s.memory.peak_of[index(Tag::Host)];
  for (const StepReport& r : reports_)
    s.checkpointing.hidden_seconds += r.hidden_seconds / static_cast<double>(reports_.size());
  s.checkpointing.recomputed_flops = last.recomputed_flops;
  s.checkpointing.forward_flops = last.forward_flops;
  s.checkpointing.plan = plan_of_layers(config_);
  for (const auto& [key, counts] : trainer_->expected(last)) s.predicted.bytes_on_wire += counts.wire_bytes;
  return s;
}

}  // namespace regather
