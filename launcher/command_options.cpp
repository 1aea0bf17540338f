#include "launcher/command_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <functional>
#include <optional>
#include <set>

#include "launcher/config_units.h"
#include "launcher/config_value.h"
#include "launcher/launch_place.h"

namespace regather {
namespace {

// Commands that other builds have; refused by name, so that a typo is told apart from what is missing.
constexpr std::array<std::string_view, 6> kNotInThisBuild = {"export",   "import", "inspect",
                                                             "tokenize", "sample", "report"};

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

// What `set` does not take is refused with what is allowed.
void add_value(CLI::App& command, const std::string& name, const std::function<bool(const std::string&)>& set,
               const std::string& allowed) {
  command.add_option_function<std::string>(name, [](const std::string&) {})
      ->check(CLI::Validator(
          [set, allowed](const std::string& text) {
            return set(text) ? "" : fmt::format("value '{}' is not allowed; allowed: {}", text, allowed);
          },
          ""));
}

// "10GB", "0.5 GB", "125000000": more than 0.
std::optional<double> bytes_a_second(std::string_view text) {
  static constexpr std::array<ValueUnit, 4> kDecimalUnits = {
      {{"TB", 1'000'000'000'000}, {"GB", 1'000'000'000}, {"MB", 1'000'000}, {"KB", 1'000}}};
  double factor = 1;
  const auto takes_unit = [&](const ValueUnit& unit) {
    if (!text.ends_with(unit.name)) return false;
    text.remove_suffix(unit.name.size());
    factor = static_cast<double>(unit.factor);
    return true;
  };
  std::ranges::any_of(kDecimalUnits, takes_unit) || std::ranges::any_of(kByteUnits, takes_unit);
  while (text.ends_with(' ')) text.remove_suffix(1);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value) || value <= 0)
    return std::nullopt;
  return value * factor;
}

void add_planning_options(CLI::App& plan, CLI::App& fit, Arguments& to) {
  plan.add_option("--world", to.plan.world)->check(integer_up_to(1 << 20));
  add_value(
      plan, "--bandwidth",
      [&](const std::string& text) {
        to.plan.bandwidth = bytes_a_second(text).value_or(0);
        return to.plan.bandwidth > 0;
      },
      "bytes a second of the link between ranks, such as 10GB or 0.5GB (B, KB, MB, GB, TB, or KiB to TiB), more than "
      "0");
  plan.add_flag("--calibrate", to.plan.calibrate);
  plan.add_option("--picture", to.plan.picture_file);
  add_value(
      fit, "--memory",
      [&](const std::string& text) {
        to.fit.memory = read_size(text).value_or(0);
        return to.fit.memory > 0;
      },
      "bytes of a rank, a size such as 512MiB or 1.5GiB (B, KiB, MiB, GiB, TiB), more than 0");
  fit.add_flag_callback("--no-confirm", [&] { to.fit.confirm = FitOptions::Confirm::No; });
}

void trim_policies(std::vector<std::string>& policies) {
  std::set<std::string> seen;
  for (std::string& policy : policies) {
    policy = CLI::detail::trim_copy(policy);
    if (!seen.insert(policy).second)
      throw UsageError(fmt::format("--policies: value '{}' is given twice; allowed: each policy once", policy));
  }
}

}  // namespace

Arguments parse_arguments(int argc, char** argv) {
  refuse_unknown_command(argc, argv);
  Arguments arguments;
  if (argc == 3 && std::string_view(argv[1]) == "help" && argv[2][0] != '-') {  // `train` is a command, and a section
    arguments.command = Arguments::Command::HelpOnKey;
    arguments.key = argv[2];
    return arguments;
  }
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

}  // namespace regather
