#include "launcher/plan.h"

#include "launcher/calibrate.h"
#include "launcher/plan_report.h"
#include "launcher/progress.h"
#include "launcher/run_device.h"
#include "launcher/summary.h"
#include "launcher/training_run.h"

namespace regather {
namespace {

PlanReport report_on(const Config& config, const PlanOptions& options, std::int64_t world, const CostModel& costs) {
  const int ranks = static_cast<int>(world);
  const Model model = make_model(config.model);
  PlanReport r;
  const bool planned = config.activation_checkpointing.policy == "budget";
  r.keep = planned ? make_keep_plan(config, model, ranks, costs) : explore_keep_plans(config, model, ranks, costs);
  const Config as_run = planned ? with_plan(config, r.keep) : config;
  const CheckpointPlan plan = checkpoint_plan(as_run);
  r.name = options.name;
  r.model = fmt::format("{}, {} layers, hidden {}, {} parameters", config.model.type, config.model.layers,
                        config.model.hidden, model.num_parameters());
  r.batch = describe_batch(config, world);
  r.sharding = describe_sharding(as_run) + (config.sharding.resident_slots == 0 ? " (planned)" : "");
  r.checkpointing = describe_checkpointing(as_run);
  r.world = world;
  r.memory_limit = config.memory.limit;
  r.blocks = plan.blocks;
  r.forecast = forecast_step(as_run, model, 0, ranks, {.costs = &costs, .bandwidth = options.bandwidth});
  if (options.bandwidth > 0) {  // the plans were compared with this machine's own collectives, which all of them have
    const double own = forecast_step(as_run, model, 0, ranks, {.costs = &costs}).seconds.total();
    for (KeepPlan::Point& p : r.keep.frontier) p.seconds += r.forecast.seconds.total() - own;
  }
  r.prices = costs.measured() ? PlanReport::Prices::Measured : PlanReport::Prices::FromLimits;
  if (const std::optional<GpuInfo> gpu = gpu_to_plan_for(config)) r.machine = gpu->name;
  r.bandwidth = options.bandwidth;
  return r;
}

std::string write_and_tell(const PlanReport& report, const PlanOptions& options) {
  if (!options.json_file.empty()) write_file(options.json_file, to_json(report));
  if (!options.picture_file.empty()) write_file(options.picture_file, plan_picture(report));
  return plan_words(report);
}

class Calibration final : public RankProgram {
 public:
  Calibration(const Config& config, const PlanOptions& options, Communicator& comm)
      : config_(config), options_(options), comm_(comm) {}
  void run() override {
    comm_.set_where("calibration");
    require_same_on_all_ranks(comm_, to_json(config_), "configurations");
    const CostModel costs = calibrate(config_, comm_);
    if (comm_.rank() != 0) return;
    const CostPlace place = cost_place(config_, comm_.size(), gpu_to_plan_for(config_));
    save_costs(place, costs);
    fmt::print("{}  kept in {}\n", write_and_tell(report_on(config_, options_, comm_.size(), costs), options_),
               cost_file(place).string());
    std::fflush(stdout);
  }

 private:
  const Config& config_;
  const PlanOptions& options_;
  Communicator& comm_;
};

}  // namespace

std::string plan_text(const Config& config, const PlanOptions& options) {
  check_against_world(config, options.world);
  return write_and_tell(report_on(config, options, options.world, costs_for(config, static_cast<int>(options.world))),
                        options);
}

int run_plan(const Config& config, const PlanOptions& options, const ReportError& report) {
  return run_on_ranks(
      config, [&](Communicator& comm) { return std::make_unique<Calibration>(config, options, comm); }, report);
}

}  // namespace regather
