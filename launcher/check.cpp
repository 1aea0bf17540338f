#include "launcher/check.h"

#include <algorithm>

#include "launcher/calibrate.h"
#include "launcher/keep_plan.h"
#include "launcher/machine.h"
#include "launcher/preflight.h"
#include "launcher/progress.h"
#include "launcher/run_device.h"
#include "launcher/summary.h"

namespace regather {
namespace {

std::string describe_planned_ranks(const CheckOptions& options, const Config& config, const LaunchPlace& place,
                                   std::int64_t ranks) {
  const std::string text = fmt::format("planned for {} rank{}", ranks, ranks == 1 ? "" : "s");
  if (ranks_are_threads(config)) return text + " (communication.sim_ranks)";
  if (place.ranks > 1) return text + ", as started";
  return text + fmt::format("; for N: tools/mpirun N regather check {}", options.name);
}

// Refuses first, then says what the run would be.
std::string describe_run(const CheckOptions& options, const Config& config, const LaunchPlace& place) {
  const std::int64_t ranks = ranks_of(config, place);
  const RunInputs inputs(config, static_cast<int>(ranks));
  const StepForecast forecast = forecast_step(config, inputs.model, 0, static_cast<int>(ranks));
  require_memory(config, forecast, static_cast<int>(ranks));
  RunFolder::require_usable(config.output, RunFolder::Existing::Overwrite);  // what it holds is not the configuration's
  const ParameterCounts parameters = parameter_counts(inputs.model);
  std::string text;
  const auto line = [&](std::string_view name, const std::string& value) {
    text += fmt::format("# {}: {}\n", name, value);
  };
  line("ranks", describe_planned_ranks(options, config, place, ranks));
  line("device", describe_device(config));
  line("model", fmt::format("{} parameters, {} trained", parameters.all, parameters.trainable));
  if (config.model.lora.rank > 0) line("adapters", describe_adapters(config.model.lora));
  line("batch", describe_batch(config, ranks));
  line("sharding", describe_sharding(config));
  line("checkpointing", describe_checkpointing(config));
  line("reduce", describe_reduce(config, parameters, ranks));
  line("memory", describe_needs(forecast));
  const std::string warning = config.device == Config::Device::Cpu
                                  ? warn_of_memory(forecast.peak, ranks, "this machine", available_memory())
                                  : std::string();
  if (config.memory.limit == 0 && !warning.empty()) line("warning", warning);
  if (RunFolder::occupied(config.output))
    line("output", options.overwrite ? "holds files already; --overwrite replaces those of an earlier run"
                                     : "holds files already: train refuses it without --overwrite");
  return text;
}

}  // namespace

std::string check_text(const Config& written, const CheckOptions& options, const LaunchPlace& place) {
  Config config = written;
  const std::string run = with_places(written, [&] {
    refuse_unread_keys(written, {&written.activation_checkpointing.policy, 1});
    require_place(written, place);
    const int ranks = static_cast<int>(ranks_of(written, place));
    if (written.activation_checkpointing.policy == "budget")
      config = settled(written, make_model(written.model), ranks, costs_for(written, ranks));
    return describe_run(options, config, place);
  });
  if (!options.json_file.empty()) write_file(options.json_file, to_json(config));
  return fmt::format("# {}: valid\n{}{}", options.name, run, to_yaml(config));
}

std::int64_t ranks_of(const Config& config, const LaunchPlace& place) {
  if (place.ranks > 1) return place.ranks;
  if (ranks_are_threads(config)) return config.communication.sim_ranks;
  return std::max<std::int64_t>(1, config.train.global_batch / (config.train.micro_batch * config.train.accumulation));
}

}  // namespace regather
