#include "launcher/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <optional>

#include "dist/communicator.h"
#include "launcher/compare.h"
#include "launcher/config.h"
#include "launcher/config_value.h"
#include "launcher/progress.h"
#include "launcher/regather.h"
#include "launcher/summary.h"
#include "launcher/train.h"
#include "model/registry.h"

namespace regather {
namespace {

// Commands that other builds have; refused by name, so that a typo is told apart from what is missing.
constexpr std::array<std::string_view, 8> kNotInThisBuild = {"fit",     "plan",     "export", "import",
                                                             "inspect", "tokenize", "sample", "report"};

constexpr std::string_view kHelp =
    R"(regather {}: sharded training of transformers, with activation checkpointing in the shard wrapper

  regather train CONFIG [--set a.b=v]... [--overwrite] [--json FILE]
                          trains; every process of mpirun or srun is a rank
  regather compare CONFIG [--set a.b=v]... [--policies a,b] [--steps N] [--rounds N] [--overwrite] [--json FILE]
                          trains briefly under several checkpoint policies: memory, speed, communication, numbers
  regather check CONFIG [--set a.b=v]... [--json FILE]
                          validates, prints the effective configuration
  regather help [KEY]     what can be configured, or one key or section
  regather --version

CONFIG is a YAML file; configs/quickstart.yaml is one to begin with:

  mpirun -np 2 regather train configs/quickstart.yaml

  --set a.b=v     replaces one key of the file, e.g. --set train.steps=10; may be repeated
  --overwrite     replaces the files of an earlier run in the output folder
  --policies a,b  compare: which (none, full, every_n_layers, segments); --steps, --rounds: how long each is measured
  --json FILE     train, compare: a copy of summary.json, compare.json; check: the effective configuration

Exit codes: 0 done, 1 failed while running, 2 bad usage or configuration, 3 out of memory, 4 a peer vanished.
)";

struct Arguments {
  enum class Command { Help, Version, Train, Compare, Check, HelpOnKey, Markdown } command = Command::Help;
  std::string config, key;
  std::vector<std::string> sets;
  TrainOptions train;
  CompareOptions compare;
};

std::optional<int> whole(const char* text) {
  if (text == nullptr) return std::nullopt;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (end == text || *end != '\0' || value < 0 || value > 1 << 24) return std::nullopt;
  return static_cast<int>(value);
}

void refuse_unknown_command(int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  const std::string_view command = argv[1];
  for (const std::string_view missing : kNotInThisBuild) {
    if (command == missing)
      throw UsageError(fmt::format("{}: not available in this build; see regather --help", command));
  }
  const std::vector<std::string> known = {"train", "compare", "check", "help"};
  if (std::find(known.begin(), known.end(), command) != known.end()) return;
  const std::string near = nearest(command, known);
  throw UsageError(fmt::format("{}: unknown command; allowed: train, compare, check, help{}", command,
                               near.empty() ? "" : fmt::format("; did you mean {}?", near)));
}

Arguments parse_arguments(int argc, char** argv) {
  refuse_unknown_command(argc, argv);
  Arguments arguments;
  CLI::App app("regather");
  app.set_help_flag();
  bool help = false, version = false, markdown = false, profile = false;
  app.add_flag("-h,--help", help);
  app.add_flag("--version", version);
  CLI::App* train = app.add_subcommand("train");
  CLI::App* compare = app.add_subcommand("compare");
  CLI::App* check = app.add_subcommand("check");
  CLI::App* on_key = app.add_subcommand("help");
  for (CLI::App* command : {train, compare, check}) {
    command->set_help_flag();
    command->add_flag("-h,--help", help);
    command->add_option("CONFIG", arguments.config);
    command->add_option("--set", arguments.sets)->allow_extra_args(false);
    command->add_option("--json", arguments.train.json_file);
  }
  for (CLI::App* command : {train, compare}) command->add_flag("--overwrite", arguments.train.overwrite);
  train->add_flag("--profile", profile);
  compare->add_option("--policies", arguments.compare.policies)->delimiter(',')->allow_extra_args(false);
  compare->add_option("--steps", arguments.compare.steps)->check(CLI::Range(1, 1'000'000));
  compare->add_option("--rounds", arguments.compare.rounds)->check(CLI::Range(1, 1'000));
  on_key->set_help_flag();
  on_key->add_flag("-h,--help", help);
  on_key->add_option("KEY", arguments.key);
  on_key->add_flag("--markdown", markdown);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    throw UsageError(fmt::format("{}; see regather --help", e.what()));
  }
  if (profile) throw UsageError("--profile: not available in this build; see regather --help");
  using Command = Arguments::Command;
  if (help || argc < 2) return arguments;
  if (version) {
    arguments.command = Command::Version;
  } else if (on_key->parsed()) {
    arguments.command = markdown ? Command::Markdown : Command::HelpOnKey;
  } else {
    arguments.command = train->parsed() ? Command::Train : compare->parsed() ? Command::Compare : Command::Check;
    if (arguments.config.empty()) throw UsageError("CONFIG is missing: the YAML file of the run; see regather --help");
  }
  return arguments;
}

void check_place(const Config& config, const LaunchPlace& place) {
  const bool threads = ranks_are_threads(config);
  if (threads && place.ranks > 1) {
    throw UsageError(
        fmt::format("communication.backend: value '{}' runs its ranks in one process, but {} were started; allowed: "
                    "mpi, or one process and communication.sim_ranks",
                    config.communication.backend, place.ranks));
  }
  check_against_world(config, threads ? config.communication.sim_ranks : place.ranks);
}

// How many ranks a configuration is described for: those that were started, else those that it asks for.
std::int64_t ranks_of(const Config& config, const LaunchPlace& place) {
  if (place.ranks > 1) return place.ranks;
  if (ranks_are_threads(config)) return config.communication.sim_ranks;
  return std::max<std::int64_t>(1, config.train.global_batch / (config.train.micro_batch * config.train.accumulation));
}

std::string check_config(const Arguments& arguments, const LaunchPlace& place, const ModelRegistry& models) {
  const Config config = load_config(arguments.config, arguments.sets, models);
  // Alone, a configuration for several ranks is fine to look at. The model may refuse sizes that no rule here knows.
  if (place.ranks > 1) check_place(config, place);
  const ParameterCounts parameters = parameter_counts(make_model(config.model));
  const std::int64_t ranks = ranks_of(config, place);
  if (place.rank == 0 && !arguments.train.json_file.empty()) write_file(arguments.train.json_file, to_json(config));
  return fmt::format(
      "# {}: valid\n# model: {} parameters, {} trained\n# batch: {}\n# checkpointing: {}\n# reduce: {}\n{}",
      arguments.config, parameters.all, parameters.trainable, describe_batch(config, ranks),
      describe_checkpointing(config), describe_reduce(config, parameters, ranks), to_yaml(config));
}

// Everything before the ranks run, which is all there is to the other commands; what to run, if that was asked for.
struct Training {
  Config config;
  TrainOptions options;
  std::optional<CompareOptions> compare{};  // then the policies are compared instead
};
std::optional<Training> prepare(int argc, char** argv, const LaunchPlace& place, const ModelRegistry& models) {
  const Arguments arguments = parse_arguments(argc, argv);
  std::string text;
  switch (arguments.command) {
    case Arguments::Command::Help: text = fmt::format(kHelp, REGATHER_VERSION); break;
    case Arguments::Command::Version: text = fmt::format("regather {}\n", REGATHER_VERSION); break;
    case Arguments::Command::HelpOnKey: text = help_on(arguments.key, models); break;
    case Arguments::Command::Markdown: text = configuration_markdown(); break;
    case Arguments::Command::Check: text = check_config(arguments, place, models); break;
    case Arguments::Command::Compare:
    case Arguments::Command::Train: {
      Config config = load_config(arguments.config, arguments.sets, models);
      check_place(config, place);
      if (arguments.command == Arguments::Command::Train) return Training{std::move(config), arguments.train};
      CompareOptions options = arguments.compare;
      options.name = arguments.config;
      options.json_file = arguments.train.json_file;
      options.overwrite = arguments.train.overwrite;
      return Training{std::move(config), arguments.train, options};
    }
  }
  if (place.rank == 0) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    if (std::fflush(stdout) != 0) throw Error("standard output cannot be written");
  }
  return std::nullopt;
}

void report(const Error& error, ErrorOrigin origin, const LaunchPlace& place) {
  std::fflush(stdout);
  const std::string lines = error_lines(error, origin, place);
  std::fwrite(lines.data(), 1, lines.size(), stderr);  // at once: lines of several ranks do not mix
}

}  // namespace

LaunchPlace launch_place(const std::function<const char*(const char*)>& variable) {
  struct Launcher {
    const char *rank, *ranks;
  };
  // Open MPI, Slurm, MPICH. Slurm's step variables: a batch script has a rank, but is no step.
  static constexpr std::array<Launcher, 3> kLaunchers = {{{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                                          {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"},
                                                          {"PMI_RANK", "PMI_SIZE"}}};
  for (const Launcher& launcher : kLaunchers) {
    const std::optional<int> rank = whole(variable(launcher.rank)), ranks = whole(variable(launcher.ranks));
    if (rank && ranks && *rank < *ranks) return {*rank, *ranks};
  }
  if (const std::optional<int> rank = whole(variable("PMIX_RANK"))) return {*rank, *rank + 1};
  return {};
}

std::string error_lines(const Error& error, ErrorOrigin origin, const LaunchPlace& place) {
  // What every rank finds is said once; what one rank finds, by that rank; that a peer vanished, by all who see it.
  const bool usage = error.code() == ExitCode::Usage;
  const bool silent = usage ? place.rank != 0 : origin == ErrorOrigin::Peer && error.code() != ExitCode::PeerVanished;
  if (silent) return "";
  const std::string prefix = place.ranks > 1 && !usage ? fmt::format("regather: error: rank {}: ", place.rank)
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
  const auto failed = [&](const Error& error) {
    report(error, ErrorOrigin::Here, place);
    if (place.ranks > 1) tell_others(error);
    return static_cast<int>(error.code());
  };
  try {
    train = prepare(argc, argv, place, models);
  } catch (const Error& e) {
    return failed(e);
  } catch (const std::exception& e) {
    return failed(Error(e.what()));
  }
  try {
    if (!train) return 0;
    if (train->compare) return run_compare(train->config, *train->compare, report);
    return run_training(train->config, train->options, report);
  } catch (const Error& e) {  // before there was a communicator: MPI could not be started
    report(e, ErrorOrigin::Here, place);
    return static_cast<int>(e.code());
  }
}

int main(int argc, char** argv, const ModelRegistry& models) {
  const LaunchPlace place = launch_place([](const char* name) { return static_cast<const char*>(std::getenv(name)); });
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
