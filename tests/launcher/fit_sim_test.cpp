// What bounds an answer, with ranks as threads.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "launcher/fit.h"
#include "tests/launcher/temporary_folder.h"

namespace regather::testing {
namespace {

struct Outcome {
  int code;
  std::string text;
  nlohmann::json json;
  const nlohmann::json& of(std::size_t policy, const char* what) const { return json["policies"][policy][what]; }
};

// A small model on two ranks, and a text of 3100 tokens.
class Fit : public ::testing::Test {
 protected:
  Outcome fit(std::int64_t memory, std::vector<std::string> policies, double patience = 60) {
    const std::filesystem::path text = folder_.path() / "text", json = folder_.path() / "fit.json";
    std::ofstream(text) << std::string(3100, 'x');
    const Config config =
        parse_config(fmt::format("model: {{layers: 2, hidden: 16, heads: 1}}\ndata: {{files: [{}], sequence: 8}}\n"
                                 "communication: {{backend: sim, sim_ranks: 2}}\n",
                                 text.string()),
                     "c.yaml");
    const FitOptions options{.name = "c.yaml",
                             .memory = memory,
                             .policies = std::move(policies),
                             .confirm = FitOptions::Confirm::No,
                             .json_file = json.string(),
                             .patience = patience};
    ::testing::internal::CaptureStdout();
    Outcome outcome{run_fit(config, options,
                            [](const Error& error, ErrorOrigin, const LaunchPlace&) { ADD_FAILURE() << error.what(); }),
                    ::testing::internal::GetCapturedStdout(),
                    {}};
    std::ifstream stream(json);
    outcome.json = nlohmann::json::parse(stream);
    return outcome;
  }
  const TemporaryFolder folder_;
};

std::size_t times(const std::string& text, const std::string& words) {
  std::size_t count = 0;
  for (std::size_t at = 0; (at = text.find(words, at)) != std::string::npos; ++at) ++count;
  return count;
}

// A step of two ranks takes eight sequences, or those of two micro-batches.
TEST_F(Fit, AnAnswerIsBoundByTheTextAndSaysSoOnce) {
  const Outcome o = fit(std::int64_t{4} << 30, {"none", "full"});
  EXPECT_EQ(o.code, 0);
  for (const std::size_t policy : {0, 1}) {
    EXPECT_EQ(o.of(policy, "sequence")["largest"], 3099 / 8);
    EXPECT_EQ(o.of(policy, "micro_batch")["largest"], 3099 / 8 / 2);
    for (const char* what : {"sequence", "micro_batch"}) EXPECT_EQ(o.of(policy, what)["bound_by"], "text");
  }
  EXPECT_EQ(times(o.text, "  sequence 388 is refused: train.micro_batch: value 4 x accumulation 1 x ranks 2 = 8 "), 1U)
      << o.text;
  EXPECT_EQ(times(o.text, "  micro_batch 194 is refused: train.micro_batch: value 194 "), 1U) << o.text;
}

TEST_F(Fit, OfOneMoreTheReasonIsALineAndTheFileHasTheTable) {
  const Outcome o = fit(1 << 20, {"full"});
  EXPECT_EQ(o.of(0, "sequence")["bound_by"], "memory");
  const std::int64_t largest = o.of(0, "sequence")["largest"];
  EXPECT_GT(largest, 8);
  EXPECT_LT(largest, 3099 / 8);
  EXPECT_EQ(times(o.text, fmt::format("  full, sequence {} is refused: ", largest + 1)), 1U) << o.text;
  EXPECT_EQ(times(o.text, "in use"), 0U) << o.text;
  EXPECT_EQ(times(o.of(0, "sequence")["one_more"], "bytes in use"), 1U);
  EXPECT_EQ(times(o.text, "not confirmed"), 1U) << o.text;
}

TEST_F(Fit, ASearchThatTakesLongSaysWhatItTries) {
  EXPECT_EQ(times(fit(1 << 20, {"full"}).text, "  trying "), 0U);
  const std::string text = fit(1 << 20, {"full"}, 0).text;
  EXPECT_EQ(times(text, "  trying full, sequence 1\n  trying full, sequence 2\n"), 1U) << text;
}

}  // namespace
}  // namespace regather::testing
