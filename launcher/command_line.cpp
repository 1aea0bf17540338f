#include "launcher/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <set>

#include "dist/communicator.h"
#include "launcher/check.h"
#include "launcher/compare.h"
#include "launcher/config.h"
#include "launcher/config_value.h"
#include "launcher/fit.h"
#include "launcher/plan.h"
#include "launcher/preflight.h"
#include "launcher/profile.h"
#include "launcher/progress.h"
#include "launcher/regather.h"
#include "launcher/summary.h"
#include "launcher/train.h"
#include "launcher/training_run.h"
#include "model/registry.h"

namespace regather {
namespace {

// Commands that other builds have; refused by name, so that a typo is told apart from what is missing.
constexpr std::array<std::string_view, 6> kNotInThisBuild = {"export",   "import", "inspect",
                                                             "tokenize", "sample", "report"};

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

struct Arguments {
  enum class Command { Help, Version, Train, Compare, Plan, Fit, Check, HelpOnKey, Markdown } command = Command::Help;
  std::string config, key;
  std::vector<std::string> sets;
  TrainOptions train;
  CompareOptions compare;
  PlanOptions plan;
  FitOptions fit;
};

bool runs_ranks(const Arguments& arguments) {
  using Command = Arguments::Command;
  return arguments.command == Command::Train || arguments.command == Command::Compare ||
         arguments.command == Command::Fit || (arguments.command == Command::Plan && arguments.plan.calibrate);
}

void refuse_unknown_command(int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  const std::string_view command = argv[1];
  for (const std::string_view missing : kNotInThisBuild) {
    if (command == missing)
      throw UsageError(fmt::format("{}: not available in this build; see regather --help", command));
  }
  const std::vector<std::string> known = {"train", "compare", "plan", "fit", "check", "help"};
  if (std::find(known.begin(), known.end(), command) != known.end()) return;
  const std::string near = nearest(command, known);
  throw UsageError(fmt::format("{}: unknown command; allowed: train, compare, plan, fit, check, help{}", command,
                               near.empty() ? "" : fmt::format("; did you mean {}?", near)));
}

// What the command that was given does not take.
std::string unexpected(const CLI::App& app) {
  const std::string extra = app.remaining(true).front();
  if (!extra.starts_with('-')) return fmt::format("{}: one argument too many; see regather --help", extra);
  const std::string name = extra.substr(0, extra.find('='));
  std::vector<std::string> options, others;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    if (name.starts_with("--") && command->get_option_no_throw(name) != nullptr) others.push_back(command->get_name());
  if (!others.empty()) return fmt::format("{}: belongs to {}; see regather --help", extra, fmt::join(others, " and "));
  for (const CLI::App* command : app.get_subcommands())
    for (const CLI::Option* option : command->get_options())
      if (option->get_name().starts_with("--")) options.push_back(option->get_name());
  const std::string near = nearest(extra, options);
  return fmt::format("{}: unknown option; {}", extra,
                     near.empty() ? "see regather --help" : fmt::format("did you mean {}?", near));
}

void add_planning_options(CLI::App& plan, CLI::App& fit, Arguments& to) {
  plan.add_option("--world", to.plan.world)->check(CLI::Range(1, 1 << 20));
  plan.add_option_function<std::uint64_t>("--bandwidth",
                                          [&](std::uint64_t b) { to.plan.bandwidth = static_cast<double>(b); })
      ->transform(CLI::AsSizeValue(true));
  plan.add_flag("--calibrate", to.plan.calibrate);
  plan.add_option("--picture", to.plan.picture_file);
  fit.add_option_function<std::uint64_t>("--memory",
                                         [&](std::uint64_t b) { to.fit.memory = static_cast<std::int64_t>(b); })
      ->transform(CLI::AsSizeValue(false));
  fit.add_flag_callback("--no-confirm", [&] { to.fit.confirm = FitOptions::Confirm::No; });
}

CLI::Validator integer_up_to(int most) {
  return CLI::Validator(
      [most](std::string& text) -> std::string {
        const std::optional<int> value = whole_number(text.c_str());
        if (value && *value >= 1 && *value <= most) return "";
        const bool digits =
            !text.empty() && text.find_first_not_of("0123456789", text.find_first_not_of("+-")) == text.npos;
        return fmt::format("value '{}' {}; allowed: an integer from 1 to {}", text,
                           digits ? "is out of range" : "is not an integer", most);
      },
      "");
}

void trim_policies(std::vector<std::string>& policies) {
  std::set<std::string> seen;
  for (std::string& policy : policies) {
    policy = CLI::detail::trim_copy(policy);
    if (!seen.insert(policy).second)
      throw UsageError(fmt::format("--policies: value '{}' is given twice; allowed: each policy once", policy));
  }
}

Arguments parse_arguments(int argc, char** argv) {
  refuse_unknown_command(argc, argv);
  Arguments arguments;
  CLI::App app("regather");
  app.set_help_flag();
  bool help = false, version = false, markdown = false;
  app.add_flag("-h,--help", help);
  app.add_flag("--version", version);
  CLI::App* train = app.add_subcommand("train");
  CLI::App* compare = app.add_subcommand("compare");
  CLI::App* plan = app.add_subcommand("plan");
  CLI::App* fit = app.add_subcommand("fit");
  CLI::App* check = app.add_subcommand("check");
  CLI::App* on_key = app.add_subcommand("help");
  for (CLI::App* command : {train, compare, plan, fit, check}) {
    command->set_help_flag();
    command->add_flag("-h,--help", help);
    command->add_option("CONFIG", arguments.config);
    command->add_option("--set", arguments.sets)->allow_extra_args(false);
    command->add_option("--json", arguments.train.json_file);
  }
  for (CLI::App* command : {train, compare, check}) command->add_flag("--overwrite", arguments.train.overwrite);
  train->add_flag("--profile", arguments.train.profile);
  for (CLI::App* command : {compare, fit})
    command->add_option("--policies", arguments.compare.policies)->delimiter(',')->allow_extra_args(false);
  compare->add_option("--steps", arguments.compare.steps)->check(integer_up_to(1'000'000));
  compare->add_option("--rounds", arguments.compare.rounds)->check(integer_up_to(1'000));
  add_planning_options(*plan, *fit, arguments);
  on_key->set_help_flag();
  on_key->add_flag("-h,--help", help);
  on_key->add_option("KEY", arguments.key);
  on_key->add_flag("--markdown", markdown);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ExtrasError&) {
    throw UsageError(unexpected(app));
  } catch (const CLI::ArgumentMismatch& e) {
    const std::string name(std::string_view(e.what()).substr(0, std::string_view(e.what()).find(':')));
    const auto names_it = [&](std::string_view a) { return a == name || a.starts_with(name + "="); };
    if (std::count_if(argv + 1, argv + argc, names_it) > 1) throw UsageError(name + ": given twice");
    throw UsageError(fmt::format("{}: needs a value; see regather --help", name));
  } catch (const CLI::ParseError& e) {
    throw UsageError(fmt::format("{}; see regather --help", e.what()));
  }
  trim_policies(arguments.compare.policies);
  using Command = Arguments::Command;
  if (help || argc < 2) return arguments;
  if (version) {
    arguments.command = Command::Version;
  } else if (on_key->parsed()) {
    arguments.command = markdown ? Command::Markdown : Command::HelpOnKey;
  } else {
    arguments.command = train->parsed()     ? Command::Train
                        : compare->parsed() ? Command::Compare
                        : plan->parsed()    ? Command::Plan
                        : fit->parsed()     ? Command::Fit
                                            : Command::Check;
    if (fit->parsed() && arguments.fit.memory == 0)
      throw UsageError("--memory is missing: bytes of a rank, such as 2GiB; see regather --help");
    if (arguments.config.empty()) throw UsageError("CONFIG is missing: the YAML file of the run; see regather --help");
  }
  return arguments;
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
      throw UsageError(fmt::format("--world: value {}, but --calibrate measures the {} ranks that run; allowed: {}",
                                   options.world, running, running));
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
    case Arguments::Command::HelpOnKey: text = help_on(arguments.key, models); break;
    case Arguments::Command::Markdown: text = configuration_markdown(); break;
    case Arguments::Command::Check:
      text = check_text(load_config(arguments.config, arguments.sets, models),
                        {arguments.config, arguments.train.json_file, arguments.train.overwrite}, place);
      break;
    case Arguments::Command::Plan: {
      Config config = load_config(arguments.config, arguments.sets, models);
      refuse_unread_keys(config, {&config.activation_checkpointing.policy, 1});
      const PlanOptions options = plan_options(arguments, config, place);
      if (options.calibrate) return Training{std::move(config), arguments.train, {}, options};
      text = plan_text(config, options);
      break;
    }
    case Arguments::Command::Fit: {
      Config config = load_config(arguments.config, arguments.sets, models);
      require_place(config, place);
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
