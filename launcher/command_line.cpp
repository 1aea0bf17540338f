#include "launcher/command_line.h"

#include <cstdio>
#include <optional>

#include "dist/communicator.h"
#include "launcher/check.h"
#include "launcher/command_options.h"
#include "launcher/config.h"
#include "launcher/preflight.h"
#include "launcher/profile.h"
#include "launcher/regather.h"

namespace regather {
namespace {

constexpr std::string_view kHelp =
    R"(regather {}: sharded training with activation checkpointing in the shards

  regather train CONFIG     trains; every process of mpirun or srun is a rank
  regather compare CONFIG   a few steps under each checkpoint policy, compared
  regather plan CONFIG      what a step needs on any number of ranks, beforehand
  regather fit CONFIG       longest sequence and largest micro-batch that fit
  regather check CONFIG     refuses what train would; prints what is in effect
  regather help [KEY]       all keys, or one key or section
  regather --version

CONFIG is a YAML file; configs/quickstart.yaml is one to begin with. On 2 ranks:

  tools/mpirun 2 build/cpu/regather train configs/quickstart.yaml

Ctrl-C or SIGTERM ends a run after its step; to mpirun, send SIGUSR1 instead.
  --set a.b=v       replaces one key of the file; again for another key
  --overwrite       replaces what an earlier train or compare wrote
  --json FILE       a copy of what was found; --profile: where train's time went
  --policies a,b    compare, fit: which; --steps N, --rounds N: for how long
  --world N         plan: ranks; --bandwidth B: of their link; --picture FILE
  --calibrate       plan: first measures what operations cost, on all ranks
  --memory 2GiB     fit: of a rank; --no-confirm: trains no step at the answer

Exit codes: 0 done, 1 failed, 2 usage, 3 out of memory, 4 a peer vanished
)";

// And no section of the configuration, as train is.
bool is_command(std::string_view name) {
  return name == "compare" || name == "plan" || name == "fit" || name == "check" || name == "help";
}

bool runs_ranks(const Arguments& arguments) {
  using Command = Arguments::Command;
  return arguments.command == Command::Train || arguments.command == Command::Compare ||
         arguments.command == Command::Fit || (arguments.command == Command::Plan && arguments.plan.calibrate);
}

void check_steps_to_profile(const Config& config) {
  const bool early = config.train.stop_after > 0 && config.train.stop_after < config.train.steps;
  const std::int64_t steps = early ? config.train.stop_after : config.train.steps;
  if (steps > Profiler::kWarmUpSteps) return;
  throw UsageError(fmt::format(
      "{}: value {} leaves --profile nothing to record: the first {} steps warm up; allowed: {} "
      "or more",
      early ? "train.stop_after" : "train.steps", steps, Profiler::kWarmUpSteps, Profiler::kWarmUpSteps + 1));
}

// With --calibrate the ranks that run are those that are planned for.
PlanOptions plan_options(const Arguments& arguments, const Config& config, const LaunchPlace& place) {
  PlanOptions options = arguments.plan;
  options.name = arguments.config;
  options.json_file = arguments.train.json_file;
  if (options.calibrate) {
    require_place(config, place);
    const std::int64_t running = ranks_are_threads(config) ? config.communication.sim_ranks : place.ranks;
    if (options.world != 0 && options.world != running)
      throw UsageError(
          fmt::format("--world: value {}, but --calibrate measures the ranks that run, which {}; allowed: "
                      "{}, or tools/mpirun {} regather plan {} --calibrate",
                      options.world, running == 1 ? "is one" : fmt::format("are {}", running), running, options.world,
                      options.name));
  }
  if (options.world == 0) options.world = ranks_of(config, place);
  return options;
}

// Everything before the ranks run, which is all there is to the other commands; what to run, if that was asked for.
struct Training {
  Config config;
  TrainOptions options;
  std::optional<CompareOptions> compare{};  // then the policies are compared instead
  std::optional<PlanOptions> plan{};        // then operations are measured, and a plan is made
  std::optional<FitOptions> fit{};          // then sizes are searched for
};
std::optional<Training> prepare(const Arguments& arguments, const LaunchPlace& place, const ModelRegistry& models) {
  if (place.rank == 0 && !arguments.train.json_file.empty()) require_writable(arguments.train.json_file, "--json");
  std::string text;
  switch (arguments.command) {
    case Arguments::Command::Help: text = fmt::format(kHelp, REGATHER_VERSION); break;
    case Arguments::Command::Version: text = fmt::format("regather {}\n", REGATHER_VERSION); break;
    case Arguments::Command::HelpOnKey:
      text = is_command(arguments.key) ? fmt::format(kHelp, REGATHER_VERSION) : help_on(arguments.key, models);
      break;
    case Arguments::Command::Markdown: text = configuration_markdown(); break;
    case Arguments::Command::Check:
      text = check_text(load_config(arguments.config, arguments.sets, models),
                        {arguments.config, arguments.train.json_file, arguments.train.overwrite}, place);
      break;
    case Arguments::Command::Plan: {
      Config config = load_config(arguments.config, arguments.sets, models);
      refuse_unread_keys(config, {&config.activation_checkpointing.policy, 1});
      const PlanOptions options = with_places(config, [&] { return plan_options(arguments, config, place); });
      if (options.calibrate) return Training{std::move(config), arguments.train, {}, options};
      text = with_places(config, [&] { return plan_text(config, options); });
      break;
    }
    case Arguments::Command::Fit: {
      Config config = load_config(arguments.config, arguments.sets, models);
      with_places(config, [&] { require_place(config, place); });
      FitOptions options = arguments.fit;
      options.name = arguments.config;
      options.policies = arguments.compare.policies;
      options.json_file = arguments.train.json_file;
      return Training{std::move(config), arguments.train, {}, {}, options};
    }
    case Arguments::Command::Compare:
    case Arguments::Command::Train: {
      Config config = load_config(arguments.config, arguments.sets, models);
      with_places(config, [&] {
        require_place(config, place);
        check_against_world(config, ranks_are_threads(config) ? config.communication.sim_ranks : place.ranks);
        if (arguments.train.profile) check_steps_to_profile(config);
      });
      if (arguments.command == Arguments::Command::Train)
        refuse_unread_keys(config, {&config.activation_checkpointing.policy, 1});
      if (arguments.command == Arguments::Command::Train) return Training{std::move(config), arguments.train};
      CompareOptions options = arguments.compare;
      options.name = arguments.config;
      options.json_file = arguments.train.json_file;
      options.overwrite = arguments.train.overwrite;
      return Training{std::move(config), arguments.train, options};
    }
  }
  std::fwrite(text.data(), 1, text.size(), stdout);
  if (std::fflush(stdout) != 0) throw Error("standard output cannot be written");
  return std::nullopt;
}

void report(const Error& error, ErrorOrigin origin, const LaunchPlace& place) {
  std::fflush(stdout);
  const std::string lines = error_lines(error, origin, place);
  std::fwrite(lines.data(), 1, lines.size(), stderr);  // at once: lines of several ranks do not mix
}

}  // namespace

std::string error_lines(const Error& error, ErrorOrigin origin, const LaunchPlace& place) {
  // What every rank finds is said once; what one rank finds, by that rank; that a peer vanished, by all who see it.
  const bool of_all = error.code() == ExitCode::Usage || origin == ErrorOrigin::AllRanks;
  const bool silent = of_all ? place.rank != 0 : origin == ErrorOrigin::Peer && error.code() != ExitCode::PeerVanished;
  if (silent) return "";
  const std::string prefix = place.ranks > 1 && !of_all ? fmt::format("regather: error: rank {}: ", place.rank)
                                                        : std::string("regather: error: ");
  std::string lines;
  std::string_view rest = error.what();
  while (true) {
    const std::size_t end = rest.find('\n');
    lines += prefix + std::string(rest.substr(0, end)) + "\n";
    if (end == std::string_view::npos) return lines;
    rest.remove_prefix(end + 1);
  }
}

int run_command_line(int argc, char** argv, const LaunchPlace& place,
                     const std::function<void(const Error&)>& tell_others, const ModelRegistry& models) {
  std::optional<Training> train;
  bool others_join = place.ranks > 1;
  const auto failed = [&](const Error& error, ErrorOrigin origin = ErrorOrigin::Here) {
    report(error, origin, place);
    if (others_join) tell_others(error);
    return static_cast<int>(error.code());
  };
  try {
    const Arguments arguments = parse_arguments(argc, argv);
    if (!runs_ranks(arguments)) {  // rank 0 does it alone, and meets nobody
      if (place.rank != 0) return static_cast<int>(ExitCode::Done);
      others_join = false;
    }
    train = prepare(arguments, place, models);
  } catch (const FoundByAllRanks& e) {
    return failed(e, ErrorOrigin::AllRanks);
  } catch (const Error& e) {
    return failed(e);
  } catch (const std::exception& e) {
    return failed(Error(e.what()));
  }
  try {
    if (!train) return 0;
    if (train->fit) return run_fit(train->config, *train->fit, report);
    if (train->plan) return run_plan(train->config, *train->plan, report);
    if (train->compare) return run_compare(train->config, *train->compare, report);
    return run_training(train->config, train->options, report);
  } catch (Error& e) {  // before there was a communicator: MPI could not be started
    add_place(train->config, e);
    report(e, ErrorOrigin::Here, place);
    return static_cast<int>(e.code());
  }
}

int main(int argc, char** argv, const ModelRegistry& models) {
  const LaunchPlace place = launch_place();
  return run_command_line(
      argc, argv, place,
      [](const Error& error) {
        try {
          make_mpi_communicator({})->leave(error.what(), error.code());
        } catch (const Error&) {
          // Without MPI nobody else is there to be told; the error itself has been printed.
        }
      },
      models);
}

}  // namespace regather
