// Ranks as threads: conformance at 1 to 8 ranks, and ranks that fail.
#include <atomic>
#include <mutex>
#include <thread>

#include "tests/dist/communicator_conformance.h"
#include "tests/dist/outcome.h"

namespace regather::conformance {
namespace {

using namespace std::chrono_literals;

Backend sim(int ranks, std::chrono::microseconds delay = {}) {
  const std::string name = "sim" + std::to_string(ranks) + (delay.count() > 0 ? "delayed" : "");
  return {name, [ranks, delay](SimOptions options, const auto& body) {
            options.delay += delay;
            run_ranks(ranks, options, body);
          }};
}

INSTANTIATE_TEST_SUITE_P(Sim, CommunicatorConformance,
                         ::testing::Values(sim(1), sim(2), sim(3), sim(4), sim(8), sim(3, 200us)), name_of_backend);

Outcome run_failing(int ranks, const SimOptions& options, const std::function<void(Communicator&)>& body) {
  return {ranks, [&](const Outcome::Note& note) {
            run_ranks(ranks, options, [&](Communicator& c) { note(c.rank(), [&] { body(c); }); });
          }};
}

void gather(Communicator& c, std::int64_t shard, const Label& label = kLabel) {
  std::vector<float> data(static_cast<std::size_t>(c.size() * shard));
  const GatherBuffer buffer{data.data(), shard, DType::F32};
  c.all_gather({&buffer, 1}, label).wait();
}

TEST(SimFailure, ARankThatThrowsWakesTheOthersWithItsReasonAndCode) {
  for (const int ranks : {2, 4, 8}) {
    const Outcome o = run_failing(ranks, {}, [](Communicator& c) {
      gather(c, 10);
      if (c.rank() == 1) throw Error("step 3: the loss is nan", ExitCode::OutOfMemory);
      gather(c, 10);
    });
    EXPECT_EQ(o.thrown, "step 3: the loss is nan");
    for (std::size_t r = 0; r < o.texts.size(); ++r) {
      EXPECT_EQ(o.codes[r], ExitCode::OutOfMemory);
      if (r == 1) continue;
      EXPECT_EQ(o.failed_peer[r], 1);
      EXPECT_EQ(o.texts[r], "all_gather of block 3 (forward): rank 1 left: step 3: the loss is nan");
    }
    EXPECT_LT(o.seconds, 30);  // of 60
  }
}

TEST(SimFailure, ForeignExceptionsAreRethrownAsTheyAre) {
  EXPECT_THROW(run_ranks(3, {},
                         [](Communicator& c) {
                           if (c.rank() == 2) throw std::out_of_range("not an Error");
                           gather(c, 1);
                         }),
               std::out_of_range);
}

TEST(SimFailure, PendingAndLaterCollectivesFailToo) {
  std::atomic<int> refused = 0;
  std::atomic<bool> started = false;
  run_failing(2, {}, [&](Communicator& c) {
    std::vector<float> a(20), b(20);
    const GatherBuffer first{a.data(), 10, DType::F32}, second{b.data(), 10, DType::F32};
    if (c.rank() == 1) {
      started.wait(false);
      throw Error("gone");
    }
    const Event one = c.all_gather({&first, 1}, kLabel), two = c.all_gather({&second, 1}, kLabel);
    started = true;
    started.notify_one();
    for (const Event& e : {one, two}) {
      try {
        e.wait();
      } catch (const PeerFailed&) {
        ++refused;
      }
      EXPECT_FALSE(e.done());
    }
    std::vector<double> scalars(1);
    EXPECT_THROW(c.all_reduce(scalars, kLabel), PeerFailed);
    EXPECT_THROW(c.barrier(kLabel), PeerFailed);
  });
  EXPECT_EQ(refused, 2);
}

TEST(SimFailure, ALiveRankThatSkipsACollectiveIsNamedWithBothSides) {
  SimOptions options;
  options.timeout = 600ms;
  const Outcome o = run_failing(3, options, [](Communicator& c) {
    c.set_where("step 7");
    if (c.rank() != 2) gather(c, 10, {.unit = "block", .pass = Pass::Backward, .detail = "block 2"});
    c.barrier({.unit = "end", .pass = Pass::Step});
  });
  for (const std::size_t r : {0u, 1u}) {
    EXPECT_EQ(o.codes[r], ExitCode::PeerVanished);
    EXPECT_TRUE(contains(o.texts[r], "step 7, in all_gather of block 2 (backward) [fp32 x 30]")) << o.texts[r];
    EXPECT_TRUE(contains(o.texts[r], "rank 2 is at step 7, in barrier of end (step)")) << o.texts[r];
  }
  EXPECT_LT(o.seconds, 30);  // of 60
}

TEST(SimFailure, ARankThatEndsOnceItHasHandedInItsTextIsNotMissed) {
  std::vector<std::string> texts;
  const Outcome o = run_failing(3, {}, [&](Communicator& c) {
    if (c.rank() == 2) std::this_thread::sleep_for(600ms);  // rank 1 has long ended
    const std::vector<std::string> all = c.collect(std::to_string(c.rank()));
    if (c.rank() == 0) texts = all;
  });
  EXPECT_EQ(o.thrown, "");
  EXPECT_EQ(texts, (std::vector<std::string>{"0", "1", "2"}));
}

TEST(SimFailure, ARankThatEndsWithoutItsTextIs) {
  const Outcome o = run_failing(3, {}, [](Communicator& c) {
    if (c.rank() != 2) c.collect("");
  });
  EXPECT_EQ(o.codes[0], ExitCode::PeerVanished);
  EXPECT_TRUE(contains(o.texts[0], "rank 2 is gone")) << o.texts[0];
}

TEST(SimFailure, ARankThatDoesNotAnswerIsSaidToBeSilent) {
  SimOptions options;
  options.timeout = 200ms;
  const Outcome o = run_failing(2, options, [](Communicator& c) {
    if (c.rank() == 1) std::this_thread::sleep_for(2s);
    gather(c, 10);
  });
  EXPECT_TRUE(contains(o.texts[0], "rank 1 gives no answer")) << o.texts[0];
  EXPECT_EQ(o.codes[1], ExitCode::PeerVanished);
}

TEST(SimFailure, ARankThatComputesAnswersFromItsProgressCalls) {
  SimOptions options;
  options.timeout = 200ms;
  const Outcome o = run_failing(2, options, [](Communicator& c) {
    c.set_where("step 4");
    const auto end = std::chrono::steady_clock::now() + 1s;
    while (c.rank() == 1 && std::chrono::steady_clock::now() < end) c.progress();
    gather(c, 10);
  });
  EXPECT_TRUE(contains(o.texts[0], "rank 1 is at step 4, in no collective")) << o.texts[0];
}

TEST(SimFailure, ARankThatEndsEarlyIsNoticedWithoutTheTimeout) {
  const Outcome o = run_failing(2, {}, [](Communicator& c) {
    if (c.rank() == 0) gather(c, 10);
  });
  EXPECT_EQ(o.codes[0], ExitCode::PeerVanished);
  EXPECT_TRUE(contains(o.thrown, "rank 1 is gone")) << o.thrown;
  EXPECT_LT(o.seconds, 30);  // of 60
}

TEST(SimFailure, CheckedModeShowsBothSidesOfAMismatch) {
  SimOptions options;
  options.checked = true;
  const auto mismatch = [&](const std::function<void(Communicator&)>& body) {
    const Outcome o = run_failing(2, options, body);
    EXPECT_EQ(o.texts[0].substr(o.texts[0].find(": ")), o.texts[1].substr(o.texts[1].find(": ")));
    return o.texts[0];
  };
  EXPECT_TRUE(contains(mismatch([](Communicator& c) {
                         std::vector<float> full(100), owned(50);
                         if (c.rank() == 0)
                           gather(c, 50);
                         else
                           c.reduce_scatter(full.data(), owned.data(), 50,
                                            {.unit = "block", .pass = Pass::Backward, .detail = "block 2"})
                               .wait();
                       }),
                       "rank 1 calls reduce_scatter of block 2 (backward) [fp32 x 100], rank 0 calls all_gather of "
                       "block 3 (forward) [fp32 x 100]"));
  EXPECT_TRUE(contains(mismatch([](Communicator& c) { gather(c, 10 + c.rank()); }), "[fp32 x 22], rank 0"));
  EXPECT_TRUE(contains(
      mismatch([](Communicator& c) { gather(c, 5, {.unit = c.rank() == 0 ? "wte" : "wpe", .pass = Pass::Forward}); }),
      "rank 1 calls all_gather of wpe (forward)"));
  EXPECT_TRUE(contains(mismatch([](Communicator& c) {
                         if (c.rank() == 0)
                           c.barrier(kLabel);
                         else
                           c.exchange("");
                       }),
                       "rank 1 calls exchange of texts, rank 0 calls barrier"));
}

TEST(SimFailure, AChangedContributionIsNoticed) {
  SimOptions options;
  options.delay = 1ms;
  const Outcome o = run_failing(2, options, [](Communicator& c) {
    std::vector<float> full(8), owned(4);
    const Event e = c.reduce_scatter(full.data(), owned.data(), 4, kLabel);
    full[0] = static_cast<float>(c.rank());
    e.wait();
  });
  EXPECT_TRUE(contains(o.thrown, "changed before the collective's end")) << o.thrown;
}

TEST(SimFailure, AnInterruptedWaitWarnsOnceAndGoesOn) {
  volatile std::sig_atomic_t interrupted = 1;
  std::mutex mutex;
  std::vector<std::string> warnings;
  SimOptions options;
  options.interrupt = &interrupted;
  options.warn = [&](const std::string& line) {
    const std::lock_guard lock(mutex);
    warnings.push_back(line);
  };
  run_ranks(2, options, [](Communicator& c) {
    c.set_where("step 9");
    if (c.rank() == 1) std::this_thread::sleep_for(1500ms);
    gather(c, 3);
  });
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_TRUE(contains(warnings[0], "rank 0 is at step 9, in all_gather of block 3 (forward)")) << warnings[0];
}

TEST(SimFailure, AnEventCannotBeWaitedForAfterItsCommunicator) {
  Event left_over;
  std::vector<float> data(20);
  std::atomic<bool> started = false;
  run_ranks(2, {}, [&](Communicator& c) {
    const GatherBuffer buffer{data.data() + 10 * c.rank(), 5, DType::F32};
    const Event event = c.all_gather({&buffer, 1}, kLabel);
    if (c.rank() == 0)
      left_over = event;
    else
      event.wait();
    started = true;
  });
  EXPECT_THROW(left_over.wait(), LogicError);
}

}  // namespace
}  // namespace regather::conformance
