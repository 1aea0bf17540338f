// communication.audit: what a run says, and on which rank it was seen.
#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <nlohmann/json.hpp>

#include "launcher/training_run.h"
#include "tests/launcher/faulty_block.h"
#include "tests/launcher/temporary_folder.h"

namespace regather::testing {
namespace {

// A run of two ranks of which the second forgets, in the second step, what it has communicated so far.
struct Outcome {
  int code = 0;
  std::string said, error;
  bool as_planned = true;
};
Outcome run_with_a_difference_on_rank_1(const std::string& audit) {
  const TemporaryFolder folder;
  std::ofstream(folder.path() / "text") << std::string(4000, 'x');
  static thread_local Communicator* comm_of_rank;
  ModelRegistry models = built_in_models();
  models.push_back({"forgetful", [](const ModelConfig& m) {
                      ModelConfig gpt2 = m;
                      gpt2.type = "gpt2";
                      Model model = make_model(gpt2);
                      put_fault(model, 0, [](std::uint64_t step, float*, std::int64_t) {
                        if (step == 1 && comm_of_rank != nullptr && comm_of_rank->rank() == 1)
                          comm_of_rank->reset_ledger();
                      });
                      return model;
                    }});
  const Config config = parse_config(
      fmt::format(
          "data: {{files: [{}], sequence: 8}}\noutput: {}\ntrain: {{steps: 2}}\nmodel: {{type: forgetful, layers: "
          "2, hidden: 16, heads: 2}}\nactivation_checkpointing: {{policy: none}}\n"
          "communication: {{backend: sim, sim_ranks: 2, audit: {}}}\n",
          (folder.path() / "text").string(), (folder.path() / "run").string(), audit),
      "c.yaml", {}, models);
  const TrainOptions options;
  const StopSignal stop;
  struct Program final : RankProgram {
    Program(const Config& c, const TrainOptions& o, const StopSignal& s, Communicator& comm) : run_(c, o, s, comm) {
      comm_of_rank = &comm;
    }
    ~Program() override { comm_of_rank = nullptr; }
    void run() override { run_.run(); }
    TrainingRun run_;
  };
  Outcome outcome;
  std::mutex mutex;
  ::testing::internal::CaptureStdout();
  outcome.code = run_on_ranks(
      config, [&](Communicator& comm) { return std::make_unique<Program>(config, options, stop, comm); },
      [&](const Error& e, ErrorOrigin, const LaunchPlace&) {
        const std::lock_guard lock(mutex);
        outcome.error += e.what();
      });
  outcome.said = ::testing::internal::GetCapturedStdout();
  if (std::ifstream summary(folder.path() / "run/summary.json"); summary)
    outcome.as_planned = nlohmann::json::parse(summary)["collectives"]["expected_matches"];
  return outcome;
}

TEST(CommunicationAudit, AWarningTellsWhatRankZeroDoesNotSee) {
  const Outcome outcome = run_with_a_difference_on_rank_1("warn");
  EXPECT_EQ(outcome.code, 0) << outcome.error;
  EXPECT_FALSE(outcome.as_planned);
  const auto says = [&](const std::string& line) { return outcome.said.find(line) != std::string::npos; };
  EXPECT_TRUE(says("communication of rank 1 differs from the plan: all_gather of wte")) << outcome.said;
  EXPECT_FALSE(says("\ncommunication differs from the plan")) << "rank 0 saw nothing: " << outcome.said;
}

TEST(CommunicationAudit, AnErrorEndsTheRunWhicheverRankSeesIt) {
  const Outcome outcome = run_with_a_difference_on_rank_1("error");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_NE(outcome.error.find("the step communicated other than planned (communication.audit: error)"),
            std::string::npos)
      << outcome.error;
}

}  // namespace
}  // namespace regather::testing
