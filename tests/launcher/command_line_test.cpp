#include "launcher/command_line.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/launcher/temporary_folder.h"

namespace regather {
namespace {

struct Outcome {
  int code;
  std::string out, err, told;
};

// Runs the program in this process, as if it had been started in that place.
Outcome run(std::vector<std::string> arguments, const LaunchPlace& place = {}) {
  arguments.insert(arguments.begin(), "regather");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  const int argc = static_cast<int>(argv.size());
  argv.push_back(nullptr);
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  Outcome outcome{0, "", "", ""};
  outcome.code = run_command_line(argc, argv.data(), place, [&](const Error& error) { outcome.told = error.what(); });
  outcome.out = ::testing::internal::GetCapturedStdout();
  outcome.err = ::testing::internal::GetCapturedStderr();
  return outcome;
}

LaunchPlace place_in(const std::map<std::string, std::string>& environment) {
  return launch_place([&](const char* name) {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
}

class CommandLine : public ::testing::Test {
 protected:
  void SetUp() override { std::ofstream(folder_ / "text") << std::string(3100, 'x'); }
  std::string config(const std::string& rest = "") {
    std::ofstream(folder_ / "c.yaml") << "data:\n  files: [text]\n" << rest;
    return (folder_ / "c.yaml").string();
  }
  const testing::TemporaryFolder own_;
  const std::filesystem::path folder_ = own_.path();
};

TEST_F(CommandLine, HelpFitsAScreen) {
  const Outcome help = run({"--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_EQ(help.err, "");
  EXPECT_LE(std::count(help.out.begin(), help.out.end(), '\n'), 24);
  std::istringstream lines(help.out);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80U) << line;
  for (const std::string missing : {"export", "sample"}) EXPECT_EQ(help.out.find(missing), std::string::npos);
  EXPECT_EQ(run({}).out, help.out);
  EXPECT_EQ(run({"train", "--help"}).out, help.out);
}

TEST_F(CommandLine, HelpOnACommandIsTheScreenAndHelpOnTrainItsSection) {
  for (const std::string command : {"compare", "plan", "fit", "check"})
    EXPECT_EQ(run({"help", command}).out, run({"--help"}).out);
  const std::string train = run({"help", "train"}).out;
  EXPECT_EQ(train.find("train.steps "), 0U) << train;
  EXPECT_EQ(train.find("model.layers"), std::string::npos) << train;
  EXPECT_NE(train.find("`regather --help` is about commands.\n"), std::string::npos) << train;
}

TEST_F(CommandLine, VersionIsOneLine) {
  const Outcome version = run({"--version"});
  EXPECT_EQ(version.code, 0);
  EXPECT_EQ(version.out.find("regather 0."), 0U);
  EXPECT_EQ(std::count(version.out.begin(), version.out.end(), '\n'), 1);
}

TEST_F(CommandLine, CommandsThatAreMissingAreToldApartFromUnknownOnes) {
  EXPECT_EQ(run({"export", "c.yaml"}).err,
            "regather: error: export: not available in this build; see regather --help\n");
  EXPECT_EQ(run({"fit", "c.yaml"}).code, 2);
  EXPECT_EQ(run({"compare"}).code, 2);
  EXPECT_EQ(run({"trian", "c.yaml"}).err,
            "regather: error: trian: unknown command; allowed: train, compare, plan, fit, check, help; did you mean "
            "train?\n");
  EXPECT_EQ(run({"trian"}).code, 2);
}

TEST_F(CommandLine, BadOptionsAreUsageErrors) {
  for (const auto& arguments : std::vector<std::vector<std::string>>{{"--foo"},
                                                                     {"train"},
                                                                     {"train", config(), "--foo"},
                                                                     {"train", config(), "--set"},
                                                                     {"check", config(), "--profile"},
                                                                     {"check", config(), config()},
                                                                     {"help", "no.such.key"},
                                                                     {"check", (folder_ / "none.yaml").string()}}) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(outcome.err.find("regather: error: "), 0U);
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  }
}

TEST_F(CommandLine, AnUnknownOptionIsRefusedWithTheNearestOne) {
  const auto refusal = [&](std::vector<std::string> arguments) {
    const Outcome outcome = run(std::move(arguments));
    EXPECT_EQ(outcome.code, 2);
    return outcome.err;
  };
  const std::string error = "regather: error: ";
  EXPECT_EQ(refusal({"train", config(), "--overwrit"}),
            error + "--overwrit: unknown option; did you mean --overwrite?\n");
  EXPECT_EQ(refusal({"train", config(), "--policies=full"}),
            error + "--policies=full: belongs to compare and fit; see regather --help\n");
  EXPECT_EQ(refusal({"check", config(), "--profile"}), error + "--profile: belongs to train; see regather --help\n");
  EXPECT_EQ(
      refusal({"compare", config(), "--steps", "abc"}),
      error + "--steps: value 'abc' is not an integer; allowed: an integer from 1 to 1000000; see regather --help\n");
  EXPECT_EQ(refusal({"compare", config(), "--rounds=0"}),
            error + "--rounds: value '0' is out of range; allowed: an integer from 1 to 1000; see regather --help\n");
  EXPECT_EQ(refusal({"compare", config(), "--steps", "1", "--steps", "2"}), error + "--steps: given twice\n");
  EXPECT_EQ(refusal({"compare", config(), "--policies", "none, full,none"}),
            error + "--policies: value 'none' is given twice; allowed: each policy once\n");
  EXPECT_EQ(refusal({"plan", config(), "--world", "0"}),
            error + "--world: value '0' is out of range; allowed: an integer from 1 to 1048576; see regather --help\n");
  EXPECT_EQ(refusal({"--versio"}), error + "--versio: unknown option; see regather --help\n");
  EXPECT_EQ(refusal({"check", config(), "again.yaml"}),
            error + "again.yaml: one argument too many; see regather --help\n");
}

TEST_F(CommandLine, AnOptionWithoutItsValueIsNamed) {
  for (const std::string option : {"--set", "--json"})
    EXPECT_EQ(run({"train", config(), option}).err,
              "regather: error: " + option + ": needs a value; see regather --help\n");
}

TEST_F(CommandLine, SizesOfOptionsAreReadAsThoseOfKeysAndRefusedWithWhatIsAllowed) {
  const auto refused = [&](const std::string& command, const std::string& option, const std::string& value) {
    const Outcome outcome = run({command, config(), option, value});
    EXPECT_EQ(outcome.code, 2) << value;
    EXPECT_EQ(
        outcome.err.find("regather: error: " + option + ": value '" + value + "' is not allowed; allowed: bytes "), 0U)
        << outcome.err;
  };
  for (const std::string bad : {"0", "-1", "x", "2GB", "1.5", "nan"}) refused("fit", "--memory", bad);
  for (const std::string bad : {"0", "-1GB", "x", "2GX", "0GB", "inf"}) refused("plan", "--bandwidth", bad);
  const auto link = [&](const std::string& value) {
    const std::string text = run({"plan", config("model: {layers: 2}\n"), "--bandwidth", value}).out;
    const std::size_t begin = text.find("beside them at ");
    return begin == std::string::npos ? text : text.substr(begin, text.find('\n', begin) - begin);
  };
  EXPECT_EQ(link("0.1GB"), "beside them at 0.1 GB/s");
  EXPECT_EQ(link("100MB"), "beside them at 0.1 GB/s");
  EXPECT_EQ(link("2 GiB"), "beside them at 2.15 GB/s");
}

TEST_F(CommandLine, PlanSaysWhichSettingItRefuses) {
  const auto refusal = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"plan", config("model: {layers: 2, hidden: 32, heads: 2}\n")});
    const Outcome outcome = run(std::move(more));
    return fmt::format("{}: {}", outcome.code, outcome.err);
  };
  const std::string budget = "activation_checkpointing.policy=budget", none = "activation_checkpointing.budget=0";
  EXPECT_EQ(refusal({"--set", "train.global_batch=8", "--world", "3"})
                .find("2: regather: error: --set train.global_batch=8: train.global_batch: value 8 is not "),
            0U);
  EXPECT_EQ(
      refusal({"--set", budget, "--set", "activation_checkpointing.budget=1KiB"})
          .find("2: regather: error: --set activation_checkpointing.budget=1KiB: activation_checkpointing.budget: "),
      0U);
  // A limit that no plan meets ends it as one that another policy does not fit.
  EXPECT_EQ(refusal({"--set", budget, "--set", none, "--set", "memory.limit=1KiB"})
                .find("3: regather: error: --set memory.limit=1KiB: memory.limit: value 1.0 KiB is not enough for "),
            0U);
  const std::string path = config();
  EXPECT_EQ(
      run({"plan", path, "--world", "2", "--calibrate"}).err,
      "regather: error: --world: value 2, but --calibrate measures the ranks that run, which is one; allowed: 1, or "
      "tools/mpirun 2 regather plan " +
          path + " --calibrate\n");
}

TEST_F(CommandLine, CheckPrintsAnEffectiveConfigurationThatChecksToItself) {
  const Outcome first =
      run({"check", config("train: {steps: 7}\n"), "--set", "model.layers=3", "--set", "train.seed=5"});
  EXPECT_EQ(first.code, 0) << first.err;
  EXPECT_NE(first.out.find("  layers: 3\n"), std::string::npos);
  EXPECT_NE(first.out.find("  seed: 5\n"), std::string::npos);
  EXPECT_NE(first.out.find("# checkpointing: full: layers 0-2 of 3\n"), std::string::npos);
  EXPECT_NE(first.out.find("# reduce: gradients take "), std::string::npos);
  std::ofstream(folder_ / "c.yaml") << first.out;
  EXPECT_EQ(run({"check", (folder_ / "c.yaml").string()}).out, first.out);
}

TEST_F(CommandLine, CheckSaysWhatWaitsInHostMemory) {
  EXPECT_EQ(run({"check", config()}).out.find("host memory"), std::string::npos);
  const std::string moving = run({"check", config(), "--set", "activation_checkpointing.offload=all"}).out;
  // The inputs of all blocks but the last: 5 x 4 x 256 x 384 values of 4 bytes.
  EXPECT_NE(moving.find("; beside it 7.5 MiB in host memory\n"), std::string::npos) << moving;
}

TEST_F(CommandLine, CheckWritesJson) {
  const std::string json = (folder_ / "c.json").string();
  EXPECT_EQ(run({"check", config(), "--set", "memory.limit=1GiB", "--json", json}).code, 0);
  std::ifstream stream(json);
  const auto parsed = nlohmann::json::parse(stream);
  EXPECT_EQ(parsed["model"]["hidden"], 384);
  EXPECT_EQ(parsed["memory"]["limit"], 1 << 30);
  EXPECT_EQ(parsed["model"]["vocab"], "auto");
  EXPECT_EQ(parsed["model"]["init_std"], 0.02);
  EXPECT_EQ(parsed["train"]["optimizer"]["betas"], (std::vector<double>{0.9, 0.95}));
}

TEST_F(CommandLine, EveryErrorIsALine) {
  const Outcome outcome = run({"check", config("trian: 1\nevla: 2\n")});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_EQ(outcome.err, "regather: error: " + config() +
                             ":3:1: trian: unknown key; did you mean train?\nregather: error: " + config() +
                             ":4:1: evla: unknown key; did you mean eval?\n");
}

TEST_F(CommandLine, UnderMpirunUsageErrorsAreSaidOnceAndAllRanksLeaveTogether) {
  for (const int rank : {0, 1, 3}) {
    const Outcome outcome = run({"train", config("trian: 1\n")}, {rank, 4});
    EXPECT_EQ(outcome.code, 2);
    EXPECT_EQ(outcome.err.empty(), rank != 0) << outcome.err;
    EXPECT_EQ(outcome.told, config() + ":3:1: trian: unknown key; did you mean train?");
  }
  EXPECT_EQ(run({"train", config("trian: 1\n")}).told, "");
}

TEST_F(CommandLine, WhatNeedsNoRanksFailsOnTheFirstAloneAndTellsNobody) {
  const std::vector<std::string> arguments = {"check", config(), "--json", (folder_ / "none" / "x.json").string()};
  for (const int rank : {0, 1}) {
    const Outcome outcome = run(arguments, {rank, 2});
    EXPECT_EQ(outcome.code, rank == 0 ? 2 : 0);
    EXPECT_EQ(outcome.err.empty(), rank != 0) << outcome.err;
    EXPECT_EQ(outcome.told, "");
  }
}

TEST_F(CommandLine, OnlyTheFirstRankSpeaks) {
  EXPECT_EQ(run({"--help"}, {1, 2}).out, "");
  EXPECT_EQ(run({"check", config()}, {1, 2}).out, "");
  EXPECT_NE(run({"check", config()}, {0, 2}).out, "");
}

TEST_F(CommandLine, GlobalBatchIsCheckedAgainstTheRanksThatWereStarted) {
  const std::string path = config("train: {global_batch: 8, micro_batch: 2}\n");
  const Outcome outcome = run({"train", path}, {0, 3});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_EQ(outcome.err,
            "regather: error: " + path +
                ":3:23: train.global_batch: value 8 is not micro_batch 2 x accumulation 1 x ranks 3 = 6; what fits: "
                "global_batch 6, or ranks 4\n");
  EXPECT_EQ(run({"check", path}, {0, 3}).code, 2);
  EXPECT_EQ(run({"check", path}, {0, 4}).code, 0);
}

// Whatever a run is refused for before its first step.
TEST_F(CommandLine, CheckRefusesWhatTrainWouldInTheSameWordsAndNothingIsLeftBehind) {
  std::ofstream(folder_ / "file") << "x";
  const auto output = [&](const std::string& name) { return "output: " + (folder_ / name).string() + "\n"; };
  const auto model = [](const std::string& more) { return "model: {layers: 2, hidden: 32, heads: 2" + more + "}\n"; };
  const std::string small = output("run") + model(""), three = "communication: {backend: sim, sim_ranks: 3}\n";
  struct Case {
    std::string keys, place_and_key;  // keys: from the third line on; the first two are data's
    int code = 2;
  };
  const std::vector<Case> cases = {
      {"  sequence: 4000\n" + output("run") + model(", max_sequence: 4000"), "2:10: data.files: "},
      {"  held_out: 12\n" + small, "3:13: data.held_out: "},
      {small + "eval: {every: 1, batches: 9}\n", "5:27: eval.batches: "},
      {small + three + "train: {micro_batch: 2, global_batch: 8}\n", "6:39: train.global_batch: "},
      {small + "train: {micro_batch: 13}\n", "5:22: train.micro_batch: value 13 x accumulation 1 x ranks 1 = 13 "},
      {small + three + "train: {micro_batch: 5}\n",
       "6:22: train.micro_batch: value 5 x accumulation 1 x ranks 3 = 15 "},
      {small + "memory: {limit: 64KiB}\n", "5:17: memory.limit: ", 3},
      {small + three + "memory: {limit: 64KiB}\n", "6:17: memory.limit: ", 3},
      {output("run") + model(", frozen: [\"*\"]"), "4:50: model.frozen: "},
      {output("run") + model(", frozen: [nothing]"), "4:50: model.frozen: "},
      {output("file") + model(""), "3:9: output: "},
      {output("file/below") + model(""), "3:9: output: "},
  };
  for (const Case& c : cases) {
    const std::string path = config(c.keys);
    const Outcome check = run({"check", path}), train = run({"train", path}), compare = run({"compare", path});
    EXPECT_EQ(check.code, c.code) << c.keys << check.err;
    EXPECT_EQ(check.err.find("regather: error: " + path + ":" + c.place_and_key), 0U) << c.keys << check.err;
    EXPECT_EQ(std::count(check.err.begin(), check.err.end(), '\n'), 1) << check.err;
    EXPECT_EQ(check.out, "");
    EXPECT_EQ(train.code, check.code) << c.keys;
    EXPECT_EQ(train.err, check.err);
    EXPECT_EQ(train.out, "") << "something was begun";
    if (c.code == 2) {  // for compare, what does not fit is a row of its table
      EXPECT_EQ(compare.err, check.err);
      EXPECT_FALSE(std::filesystem::exists(folder_ / "run")) << c.keys;
    }
    std::filesystem::remove_all(folder_ / "run");
    run({"train", path});
    EXPECT_FALSE(std::filesystem::exists(folder_ / "run")) << c.keys;
  }
}

TEST_F(CommandLine, ARunThatNeedsMoreThanTheLimitSaysHowMuchAndForWhat) {
  const std::string path = config("model: {layers: 2, hidden: 32, heads: 2}\nmemory: {limit: 64KiB}\n");
  const Outcome outcome = run({"check", path});
  for (const std::string words :
       {"memory.limit: value 64.0 KiB (65536 bytes)", "with 1 rank: ", "parameters ", "optimizer ", "activations "})
    EXPECT_NE(outcome.err.find(words), std::string::npos) << words << " in " << outcome.err;
  // What it says is what is needed.
  const std::string before = "with 1 rank: ";
  const std::int64_t needed = std::stoll(outcome.err.substr(outcome.err.find(before) + before.size()));
  const auto with_limit = [&](std::int64_t bytes) {
    return run({"check", config("model: {layers: 2, hidden: 32, heads: 2}\n"), "--set",
                "memory.limit=" + std::to_string(bytes)})
        .code;
  };
  EXPECT_EQ(with_limit(needed), 0);
  EXPECT_EQ(with_limit(needed - 1), 3);
}

TEST_F(CommandLine, AFileForJsonThatCannotBeWrittenIsRefusedBeforeAnyWork) {
  const std::string output = "output: " + (folder_ / "run").string() + "\nmodel: {layers: 2, hidden: 32, heads: 2}\n";
  const std::string path = config(output), nowhere = (folder_ / "no/such/x.json").string();
  for (const std::string command : {"train", "compare", "check"}) {
    const Outcome outcome = run({command, path, "--json", nowhere});
    EXPECT_EQ(outcome.code, 2);
    EXPECT_EQ(outcome.err, "regather: error: --json: value '" + nowhere + "' cannot be written: there is no folder " +
                               (folder_ / "no/such").string() + "\n");
    EXPECT_EQ(run({command, path, "--json", folder_.string()}).code, 2);
  }
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
}

TEST_F(CommandLine, CheckSaysThatTheOutputHoldsFilesAndRefusesOneThatCannotBe) {
  const std::string path = config("output: " + (folder_ / "run").string() + "\n");
  EXPECT_EQ(run({"check", path}).out.find("# output"), std::string::npos);
  std::filesystem::create_directories(folder_ / "run");
  EXPECT_EQ(run({"check", path}).out.find("# output"), std::string::npos);
  std::ofstream(folder_ / "run/notes") << "x";
  const Outcome occupied = run({"check", path}), refused = run({"train", path});
  EXPECT_EQ(occupied.code, 0);
  EXPECT_NE(occupied.out.find("# output: holds files already: train refuses it without --overwrite\n"),
            std::string::npos);
  EXPECT_EQ(refused.code, 2);
  EXPECT_NE(refused.err.find("holds files already (notes, ...)"), std::string::npos) << refused.err;
  const Outcome replaced = run({"check", path, "--overwrite"});
  EXPECT_EQ(replaced.code, 0);
  EXPECT_NE(replaced.out.find("# output: holds files already; --overwrite replaces"), std::string::npos);
  for (const std::string nowhere : {"/proc/x", "/sys/x/y"})
    EXPECT_EQ(run({"check", path, "--set", "output=" + nowhere}).code, 2);
}

TEST_F(CommandLine, AKeyOfAPolicyThatIsNotChosenIsRefusedByEveryCommandThatWouldIgnoreIt) {
  const std::string path = config("activation_checkpointing: {policy: none, segments: 3}\n");
  const std::string of_one =
      "value 3 is for policy segments, but activation_checkpointing.policy is none; allowed: 0, ";
  for (const std::string command : {"check", "train", "plan"})
    EXPECT_NE(run({command, path}).err.find(of_one), std::string::npos) << command;
  const std::string of_more = "value 3 is for policy segments, but the policies are none, full; allowed: 0, or policy ";
  EXPECT_NE(run({"compare", path, "--policies", "none,full"}).err.find(of_more), std::string::npos);
  EXPECT_NE(run({"fit", path, "--memory", "1GiB", "--policies", "none,full"}).err.find(of_more), std::string::npos);
}

TEST_F(CommandLine, ARunThatSkipsEveryStepFails) {
  const std::string path = config("  sequence: 8\nmodel: {layers: 2, hidden: 16, heads: 1, init_std: 1e38}\noutput: " +
                                  (folder_ / "run").string() + "\ntrain: {steps: 2, nonfinite: skip}\n");
  const Outcome outcome = run({"train", path});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_NE(outcome.err.find("train.nonfinite: all 2 steps were skipped"), std::string::npos) << outcome.err;
  std::ifstream stream(folder_ / "run/summary.json");
  EXPECT_EQ(nlohmann::json::parse(stream)["skipped_steps"], 2);
}

TEST_F(CommandLine, CheckAloneDescribesTheRanksThatTheConfigurationAsksFor) {
  EXPECT_NE(run({"check", config("train: {global_batch: 8, micro_batch: 2}\n")}).out.find("x ranks 4 = 8 sequences"),
            std::string::npos);
  EXPECT_NE(
      run({"check", config("communication: {backend: sim, sim_ranks: 3}\n")}).out.find("x ranks 3 = 12 sequences"),
      std::string::npos);
  const std::string alone = run({"check", config()}).out;
  EXPECT_NE(alone.find("x ranks 1 = 4 sequences"), std::string::npos);
  EXPECT_NE(alone.find("# ranks: planned for 1 rank; for N: tools/mpirun N regather check "), std::string::npos);
  EXPECT_NE(run({"check", config()}, {0, 2}).out.find("# ranks: planned for 2 ranks, as started\n"), std::string::npos);
}

TEST_F(CommandLine, RanksAsThreadsAndSeveralProcessesAreRefusedTogether) {
  const std::string path = config("communication: {backend: sim, sim_ranks: 2}\n");
  for (const std::string command : {"train", "check", "compare"}) {
    const Outcome outcome = run({command, path}, {0, 2});
    EXPECT_EQ(outcome.code, 2);
    EXPECT_EQ(outcome.err.find("regather: error: " + path +
                               ":3:26: communication.backend: value 'sim' runs its ranks in "
                               "one process, but 2 were started; allowed: mpi, or "),
              0U)
        << outcome.err;
  }
}

TEST(LaunchPlaceTest, IsTakenFromTheLaunchersEnvironment) {
  const auto expect = [](const std::map<std::string, std::string>& environment, int rank, int ranks) {
    const LaunchPlace place = place_in(environment);
    EXPECT_EQ(place.rank, rank);
    EXPECT_EQ(place.ranks, ranks);
  };
  expect({}, 0, 1);
  expect({{"OMPI_COMM_WORLD_RANK", "3"}, {"OMPI_COMM_WORLD_SIZE", "4"}}, 3, 4);
  expect({{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}}, 1, 2);
  expect({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}, 1, 2);
  // A batch script is no rank; a size alone, or nonsense, is none either.
  expect({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}, 0, 1);
  expect({{"OMPI_COMM_WORLD_SIZE", "4"}}, 0, 1);
  expect({{"OMPI_COMM_WORLD_RANK", "x"}, {"OMPI_COMM_WORLD_SIZE", "4"}}, 0, 1);
  expect({{"OMPI_COMM_WORLD_RANK", "4"}, {"OMPI_COMM_WORLD_SIZE", "4"}}, 0, 1);
}

TEST(ErrorLines, AreSaidByTheRankThatFailed) {
  const LaunchPlace alone, second{1, 4}, first{0, 4};
  const Error failure("step 3: loss is not finite");
  EXPECT_EQ(error_lines(failure, ErrorOrigin::Here, alone), "regather: error: step 3: loss is not finite\n");
  EXPECT_EQ(error_lines(failure, ErrorOrigin::Here, second), "regather: error: rank 1: step 3: loss is not finite\n");
  EXPECT_EQ(error_lines(failure, ErrorOrigin::Peer, first), "");
  const Error vanished("rank 2 vanished", ExitCode::PeerVanished);
  EXPECT_EQ(error_lines(vanished, ErrorOrigin::Peer, first), "regather: error: rank 0: rank 2 vanished\n");
  EXPECT_EQ(error_lines(vanished, ErrorOrigin::Peer, second), "regather: error: rank 1: rank 2 vanished\n");
  // What all of them found is said once, whatever it is.
  EXPECT_EQ(error_lines(OutOfMemory("full"), ErrorOrigin::AllRanks, first), "regather: error: full\n");
  EXPECT_EQ(error_lines(OutOfMemory("full"), ErrorOrigin::AllRanks, second), "");
  EXPECT_EQ(error_lines(OutOfMemory("full\ntable"), ErrorOrigin::Here, second),
            "regather: error: rank 1: full\nregather: error: rank 1: table\n");
}

TEST(ErrorLines, OfUsageAreSaidByTheFirstRank) {
  const LaunchPlace second{1, 4}, first{0, 4};
  const UsageError usage("c.yaml: no");
  EXPECT_EQ(error_lines(usage, ErrorOrigin::Here, first), "regather: error: c.yaml: no\n");
  EXPECT_EQ(error_lines(usage, ErrorOrigin::Here, second), "");
  // What only another rank found reaches the first rank as that rank's leaving.
  EXPECT_EQ(error_lines(usage, ErrorOrigin::Peer, first), "regather: error: c.yaml: no\n");
}

}  // namespace
}  // namespace regather
