// Which exit code a run of several ranks ends with, when its ranks are threads.
#include "launcher/ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

namespace regather::testing {
namespace {

using namespace std::chrono_literals;

class Program final : public RankProgram {
 public:
  explicit Program(std::function<void()> body) : body_(std::move(body)) {}
  void run() override { body_(); }

 private:
  std::function<void()> body_;
};

struct Outcome {
  int code = 0;
  std::vector<std::string> said;  // "rank 0 here: ..."
};

Outcome run(int ranks, const std::function<void(Communicator&)>& body) {
  const Config config = parse_config(
      fmt::format("data: {{files: [a]}}\ntrain: {{steps: 3}}\ncommunication: {{backend: sim, sim_ranks: {}}}\n", ranks),
      "c.yaml");
  Outcome outcome;
  std::mutex mutex;
  outcome.code = run_on_ranks(
      config, [&](Communicator& comm) { return std::make_unique<Program>([&] { body(comm); }); },
      [&](const Error& error, ErrorOrigin origin, const LaunchPlace& place) {
        const std::lock_guard lock(mutex);
        const char* from = origin == ErrorOrigin::Here ? "here" : origin == ErrorOrigin::Peer ? "peer" : "all";
        outcome.said.push_back(fmt::format("rank {} {}: {}", place.rank, from, error.what()));
      });
  std::ranges::sort(outcome.said);
  return outcome;
}

TEST(RanksAsThreads, EndWithTheCodeOfTheFailureThatCameFirst) {
  for (const int first : {0, 1, 2}) {
    std::atomic<bool> failing = false;
    const Outcome outcome = run(3, [&](Communicator& comm) {
      if (comm.rank() == first) {
        failing = true;
        failing.notify_one();
        throw OutOfMemory("full");
      }
      if (comm.rank() == (first + 1) % 3) {  // fails by itself, later, before it has heard of the other
        failing.wait(false);
        std::this_thread::sleep_for(100ms);
        throw Error("not finite");
      }
      comm.barrier({"scalars", Pass::Step});
    });
    EXPECT_EQ(outcome.code, 3) << "rank " << first << " was the first";
    EXPECT_EQ(outcome.said.size(), 3U);
  }
}

TEST(RanksAsThreads, EndWithTheOriginatorsCodeWhoeverNoticesIt) {
  const Outcome outcome = run(2, [](Communicator& comm) {
    if (comm.rank() == 1) throw OutOfMemory("full");
    comm.barrier({"scalars", Pass::Step});
  });
  EXPECT_EQ(outcome.code, 3);
  ASSERT_EQ(outcome.said.size(), 2U);
  EXPECT_EQ(outcome.said[0].find("rank 0 peer: "), 0U);
  EXPECT_NE(outcome.said[0].find("rank 1 left: full"), std::string::npos) << outcome.said[0];
  EXPECT_EQ(outcome.said[1], "rank 1 here: full");
  EXPECT_EQ(run(2, [](Communicator&) {}).code, 0);
}

TEST(RanksAsThreads, SayWhereAKeyWasWrittenAndWhatAllOfThemFound) {
  EXPECT_EQ(run(1, [](Communicator&) { throw UsageError("train.steps: no"); }).said,
            (std::vector<std::string>{"rank 0 here: c.yaml:2:16: train.steps: no"}));
  const Outcome outcome = run(2, [](Communicator&) { throw FoundByAllRanks("train: no", ExitCode::OutOfMemory); });
  EXPECT_EQ(outcome.code, 3);
  EXPECT_EQ(outcome.said, (std::vector<std::string>{"rank 0 all: train: no", "rank 1 all: train: no"}));
}

TEST(RanksAsThreads, SayWhatAllOfThemFindAlsoIfTheFirstRankIsTheLastToFindIt) {
  const Outcome outcome = run(3, [](Communicator& comm) {
    std::vector<float> data(3);
    const GatherBuffer buffer{data.data(), 1, DType::F32};
    const Event gathered = comm.all_gather({&buffer, 1}, {"block", Pass::Forward});
    if (comm.rank() == 0) std::this_thread::sleep_for(100ms);  // then its wait would hear of one that left
    gathered.wait();
    throw FoundByAllRanks("stopped");
  });
  EXPECT_EQ(outcome.code, 1);
  EXPECT_EQ(outcome.said,
            (std::vector<std::string>{"rank 0 all: stopped", "rank 1 all: stopped", "rank 2 all: stopped"}));
}

}  // namespace
}  // namespace regather::testing
