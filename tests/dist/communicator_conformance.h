// What every backend must do, as tests over a parameter: how a backend runs a body on its ranks. Expectations are
// computed here from plain loops, bit for bit; so backends that pass agree with each other.
#pragma once
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "dist/communicator.h"
#include "tests/dist/contributions.h"

namespace regather::conformance {

struct Backend {
  std::string name;
  std::function<void(const SimOptions&, const std::function<void(Communicator&)>&)> run;
};
inline void PrintTo(const Backend& backend, std::ostream* out) { *out << backend.name; }
inline std::string name_of_backend(const ::testing::TestParamInfo<Backend>& info) { return info.param.name; }

// A gather buffer in which only this rank's shard is filled; afterwards `complete` compares all of it.
struct Gathered {
  std::int64_t shard;
  DType dtype;
  int k;
  std::vector<std::byte> data;

  Gathered(const Communicator& c, std::int64_t s, DType t, int number_of_buffer)
      : shard(s), dtype(t), k(number_of_buffer), data(static_cast<std::size_t>(c.size()) * bytes(), std::byte{0xee}) {
    for (std::size_t i = 0; i < bytes(); ++i)
      data[static_cast<std::size_t>(c.rank()) * bytes() + i] = byte_of(c.rank(), i, k);
  }
  std::size_t bytes() const { return static_cast<std::size_t>(shard) * size_of(dtype); }
  GatherBuffer buffer() { return {data.data(), shard, dtype}; }
  bool complete(int ranks) const {
    for (int r = 0; r < ranks; ++r)
      for (std::size_t i = 0; i < bytes(); ++i)
        if (data[static_cast<std::size_t>(r) * bytes() + i] != byte_of(r, i, k)) return false;
    return true;
  }
};

inline constexpr Label kLabel{.unit = "block", .pass = Pass::Forward, .detail = "block 3"};

class CommunicatorConformance : public ::testing::TestWithParam<Backend> {
 protected:
  void run(const std::function<void(Communicator&)>& body) { run({}, body); }
  void run(SimOptions options, const std::function<void(Communicator&)>& body) {
    options.timeout = std::chrono::seconds(20);
    GetParam().run(options, body);
  }
};

TEST_P(CommunicatorConformance, AllGatherPutsEveryShardInItsPlace) {
  run([](Communicator& c) {
    for (const DType dtype : {DType::F32, DType::BF16, DType::F64, DType::I32})
      for (const std::int64_t shard : {0, 1, 7, 1000, 30000}) {
        Gathered g(c, shard, dtype, static_cast<int>(shard));
        const GatherBuffer buffer = g.buffer();
        c.all_gather({&buffer, 1}, kLabel).wait();
        EXPECT_TRUE(g.complete(c.size())) << name_of(dtype) << " x " << shard;
      }
  });
}

TEST_P(CommunicatorConformance, SeveralBuffersAreGatheredByOneCall) {
  run([](Communicator& c) {
    Gathered a(c, 5, DType::F32, 1), empty(c, 0, DType::F32, 2), b(c, 1001, DType::BF16, 3), d(c, 33, DType::F32, 4);
    const std::vector<GatherBuffer> buffers = {a.buffer(), empty.buffer(), b.buffer(), d.buffer()};
    c.all_gather(buffers, kLabel).wait();
    for (const Gathered* g : {&a, &b, &d}) EXPECT_TRUE(g->complete(c.size()));
    const Ledger::Entries& entries = c.ledger().entries();
    ASSERT_EQ(entries.size(), 2u);
    const LedgerCounts& fp32 = entries.at({Collective::AllGather, "block", Pass::Forward, DType::F32});
    EXPECT_EQ(fp32.count, 1);
    EXPECT_EQ(fp32.logical_bytes, c.size() * 38 * 4);
    EXPECT_EQ(fp32.wire_bytes, (c.size() - 1) * 38 * 4);
    const LedgerCounts& bf16 = entries.at({Collective::AllGather, "block", Pass::Forward, DType::BF16});
    EXPECT_EQ(bf16.count, 1);
    EXPECT_EQ(bf16.wire_bytes, (c.size() - 1) * 1001 * 2);
  });
}

TEST_P(CommunicatorConformance, ReduceScatterAddsContributionsInRankOrder) {
  run([](Communicator& c) {
    bool order_shows = false;
    for (const std::int64_t shard : {0, 1, 5, 1001, 20011}) {
      std::vector<float> full = numbers(c.rank(), c.size() * shard);
      std::vector<float> owned = numbers(100 + c.rank(), shard), expected = owned;
      const std::vector<float> sum = sums(c.size(), c.rank() * shard, shard);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        expected[i] += sum[i];
        float other_order = owned[i];
        for (int r = 0; r < c.size(); ++r) other_order += number(r, c.rank() * shard + static_cast<std::int64_t>(i));
        order_shows = order_shows || other_order != expected[i];
      }
      c.reduce_scatter(full.data(), owned.data(), shard, kLabel).wait();
      EXPECT_TRUE(same_bits(owned, expected)) << "shard of " << shard;
    }
    EXPECT_TRUE(order_shows || c.size() == 1) << "these numbers cannot tell one order from another";
  });
}

TEST_P(CommunicatorConformance, AllReduceGivesTheSameBitsToAllRanks) {
  run([](Communicator& c) {
    for (const std::int64_t shard : {0, 1, 999, 10001}) {
      std::vector<float> data = numbers(c.rank(), c.size() * shard);
      c.all_reduce(data.data(), shard, kLabel).wait();
      EXPECT_TRUE(same_bits(data, sums(c.size(), 0, c.size() * shard))) << "shard of " << shard;
    }
  });
}

TEST_P(CommunicatorConformance, ScalarsAreSummedInRankOrderInDouble) {
  run([](Communicator& c) {
    const auto term = [](int rank, int i) {
      return std::ldexp(static_cast<double>(number(rank, i)), (rank * 13 + i * 7) % 40);
    };
    std::vector<double> values, expected, none;
    for (int i = 0; i < 17; ++i) {
      values.push_back(term(c.rank(), i));
      double sum = term(0, i);
      for (int r = 1; r < c.size(); ++r) sum += term(r, i);
      expected.push_back(sum);
    }
    c.all_reduce(values, {.unit = "scalars", .pass = Pass::Step});
    EXPECT_TRUE(same_bits(values, expected));
    c.all_reduce(none, {.unit = "scalars", .pass = Pass::Step});
  });
}

TEST_P(CommunicatorConformance, MessagesAboveTheLimitAreSplit) {
  for (const std::int64_t limit : {1000, 999, 4}) {
    SimOptions options;
    options.max_message_bytes = limit;
    run(options, [](Communicator& c) {
      Gathered g(c, 2501, DType::BF16, 1);
      const GatherBuffer buffer = g.buffer();
      const Event gathered = c.all_gather({&buffer, 1}, kLabel);
      std::vector<float> data = numbers(c.rank(), c.size() * 2501), owned(2501);
      const Event reduced = c.reduce_scatter(data.data(), owned.data(), 2501, kLabel);
      gathered.wait();
      EXPECT_TRUE(g.complete(c.size()));
      reduced.wait();
      EXPECT_TRUE(same_bits(owned, sums(c.size(), c.rank() * 2501, 2501)));
      c.all_reduce(data.data(), 2501, kLabel).wait();
      EXPECT_TRUE(same_bits(data, sums(c.size(), 0, c.size() * 2501)));
    });
  }
}

TEST_P(CommunicatorConformance, ChunkSizesDoNotChangeBits) {
  for (const std::int64_t chunk : {1, 4, 1000, 4096, 1 << 20}) {
    SimOptions options;
    options.chunk_bytes = chunk;
    run(options, [](Communicator& c) {
      std::vector<float> full = numbers(c.rank(), c.size() * 3001);
      std::vector<float> owned(3001);
      c.reduce_scatter(full.data(), owned.data(), 3001, kLabel).wait();
      EXPECT_TRUE(same_bits(owned, sums(c.size(), c.rank() * 3001, 3001)));
    });
  }
}

TEST_P(CommunicatorConformance, ManyCollectivesAreInFlightAndWaitedForInAnyOrder) {
  SimOptions options;
  options.chunk_bytes = 512;
  options.delay = std::chrono::microseconds(100);
  run(options, [](Communicator& c) {
    constexpr int kEach = 12;
    constexpr std::int64_t kShard = 700;
    std::vector<Gathered> gathered;
    std::vector<std::vector<float>> full, reduced;
    for (int k = 0; k < kEach; ++k) {
      gathered.emplace_back(c, kShard, DType::F32, k);
      full.push_back(numbers(c.rank(), c.size() * kShard, k));
      reduced.push_back(numbers(c.rank(), c.size() * kShard, k));
    }
    // All sums go into one place: they must be added in the order of the calls.
    std::vector<float> owned(kShard), expected(kShard), nothing;
    std::vector<Event> events;
    for (int k = 0; k < kEach; ++k) {
      const std::size_t at = static_cast<std::size_t>(k);
      const GatherBuffer buffer = gathered[at].buffer();
      events.push_back(c.all_gather({&buffer, 1}, kLabel));
      events.push_back(c.reduce_scatter(full[at].data(), owned.data(), kShard, kLabel));
      events.push_back(c.reduce_scatter(nothing.data(), nothing.data(), 0, kLabel));
      events.push_back(c.all_reduce(reduced[at].data(), kShard, kLabel));
      const std::vector<float> sum = sums(c.size(), c.rank() * kShard, kShard, k);
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += sum[i];
    }
    const std::size_t last = events.size() - 1;
    for (std::size_t i = 0; i < events.size(); ++i) events[c.rank() % 2 == 0 ? last - i : i].wait();
    EXPECT_TRUE(same_bits(owned, expected));
    for (int k = 0; k < kEach; ++k) {
      EXPECT_TRUE(gathered[static_cast<std::size_t>(k)].complete(c.size()));
      EXPECT_TRUE(same_bits(reduced[static_cast<std::size_t>(k)], sums(c.size(), 0, c.size() * kShard, k)));
    }
  });
}

TEST_P(CommunicatorConformance, ProgressAloneCompletesACollective) {
  run([](Communicator& c) {
    std::vector<float> data = numbers(c.rank(), c.size() * 20000);
    const Event event = c.all_reduce(data.data(), 20000, kLabel);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!event.done() && std::chrono::steady_clock::now() < deadline) c.progress();
    EXPECT_TRUE(event.done());
    EXPECT_TRUE(same_bits(data, sums(c.size(), 0, c.size() * 20000)));
    event.wait();
  });
}

TEST_P(CommunicatorConformance, TheLedgerCountsEveryCollectiveByUnitPassAndType) {
  run([](Communicator& c) {
    const std::int64_t w = c.size();
    Gathered g(c, 10, DType::F32, 1);
    const GatherBuffer buffer = g.buffer();
    for (int i = 0; i < 3; ++i) c.all_gather({&buffer, 1}, {.unit = "block", .pass = Pass::Backward}).wait();
    std::vector<float> full(static_cast<std::size_t>(20 * w)), owned(20);
    c.reduce_scatter(full.data(), owned.data(), 20, {.unit = "wte", .pass = Pass::Backward}).wait();
    c.all_reduce(full.data(), 20, {.unit = "wte", .pass = Pass::Backward}).wait();
    std::vector<double> scalars(2);
    c.all_reduce(scalars, {.unit = "scalars", .pass = Pass::Step});
    c.barrier({.unit = "start", .pass = Pass::Step});
    c.exchange("is not counted");
    const Ledger::Entries expected = {
        {{Collective::AllGather, "block", Pass::Backward, DType::F32}, {3, 3 * w * 40, 3 * (w - 1) * 40}},
        {{Collective::ReduceScatter, "wte", Pass::Backward, DType::F32}, {1, w * 80, (w - 1) * 80}},
        {{Collective::AllReduce, "wte", Pass::Backward, DType::F32}, {1, w * 80, 2 * (w - 1) * 80}},
        {{Collective::AllReduce, "scalars", Pass::Step, DType::F64}, {1, 16, (w - 1) * 16}},
        {{Collective::Barrier, "start", Pass::Step, DType::I32}, {1, 0, 0}}};
    EXPECT_EQ(differences(expected, c.ledger().entries()), std::vector<std::string>{});
    EXPECT_EQ(c.ledger().wire_bytes(), (w - 1) * (120 + 80 + 160 + 16));
  });
}

TEST_P(CommunicatorConformance, ExchangeGivesEveryTextInRankOrder) {
  run([](Communicator& c) {
    const auto text = [](int rank, int round) {
      return std::string(static_cast<std::size_t>(rank * 20000 + round), static_cast<char>('a' + rank));
    };
    for (int round = 0; round < 3; ++round) {
      const std::vector<std::string> texts = c.exchange(text(c.rank(), round));
      ASSERT_EQ(texts.size(), static_cast<std::size_t>(c.size()));
      for (int r = 0; r < c.size(); ++r) EXPECT_EQ(texts[static_cast<std::size_t>(r)], text(r, round));
    }
  });
}

TEST_P(CommunicatorConformance, CollectGivesEveryTextToRankZeroAlone) {
  run([](Communicator& c) {
    const auto text = [](int rank, int round) {
      return std::string(static_cast<std::size_t>(rank * 200000 + round), static_cast<char>('a' + rank));
    };
    for (int round = 0; round < 3; ++round) {
      const std::vector<std::string> texts = c.collect(text(c.rank(), round));
      ASSERT_EQ(texts.size(), c.rank() == 0 ? static_cast<std::size_t>(c.size()) : 0);
      for (std::size_t r = 0; r < texts.size(); ++r) EXPECT_EQ(texts[r], text(static_cast<int>(r), round));
    }
  });
}

// What a collective costs the thread that computes, and how long it flew.
TEST_P(CommunicatorConformance, ARecorderSeesEveryCollectiveOnceAndItsWait) {
  run([](Communicator& c) {
    Recorder recorder;
    std::vector<float> full(static_cast<std::size_t>(4 * c.size()), 1.0F);
    const GatherBuffer buffer{full.data(), 4, DType::F32};
    c.all_gather({&buffer, 1}, kLabel).wait();
    c.set_recorder(&recorder);
    const Label block{"block", Pass::Forward, "block 3"};
    c.all_gather({&buffer, 1}, block).wait();
    double one = 1;
    c.all_reduce(std::span(&one, 1), kLabel);
    c.set_recorder(nullptr);
    c.all_gather({&buffer, 1}, kLabel).wait();
    const Recorder::Recording recording = recorder.take();
    ASSERT_EQ(recording.flights.size(), 2U);
    const Recorder::Flight& gather = recording.flights[0];
    EXPECT_EQ(gather.name, "all_gather of block (forward)");
    EXPECT_EQ(gather.detail, "block 3");
    EXPECT_EQ(gather.bytes, 16.0 * (c.size() - 1));
    EXPECT_GT(gather.length.count(), 0);
    std::size_t started = 0, waited = 0;
    for (const Recorder::Interval& i : recording.intervals) {
      if (i.activity == Recorder::Activity::Communicate) ++started;
      if (i.activity == Recorder::Activity::Wait && i.name == gather.name) {
        ++waited;
        EXPECT_EQ(i.detail, "block 3");
      }
    }
    EXPECT_EQ(started, 2U);
    if (c.size() > 1) {
      EXPECT_EQ(waited, 1U);
    }
  });
}

TEST_P(CommunicatorConformance, ImpossibleArgumentsAreRefused) {
  run([](Communicator& c) {
    std::vector<float> data(16);
    const GatherBuffer negative{data.data(), -1, DType::F32}, null{nullptr, 2, DType::F32};
    EXPECT_THROW(c.all_gather({&negative, 1}, kLabel), LogicError);
    EXPECT_THROW(c.all_gather({&null, 1}, kLabel), LogicError);
    EXPECT_THROW(c.all_gather({}, kLabel), LogicError);
    EXPECT_THROW(c.reduce_scatter(nullptr, data.data(), 1, kLabel), LogicError);
    EXPECT_THROW(c.all_reduce(nullptr, 1, kLabel), LogicError);
    EXPECT_TRUE(c.ledger().entries().empty());
  });
}

// A training step in small: gathers ahead of use, reductions behind it, scalars at the end.
inline void steps(Communicator& c, int count) {
  constexpr std::int64_t kShard = 257;
  constexpr int kUnits = 3;
  for (int step = 0; step < count; ++step) {
    c.set_where("step " + std::to_string(step));
    std::vector<Gathered> units;
    std::vector<std::vector<float>> full;
    for (int u = 0; u < kUnits; ++u) {
      units.emplace_back(c, kShard, DType::F32, step * kUnits + u);
      full.push_back(numbers(c.rank(), c.size() * kShard, step));
    }
    std::vector<float> owned(kShard);
    std::vector<Event> gathers, reductions;
    const auto prefetch = [&](std::size_t u) {
      const GatherBuffer buffer = units[u].buffer();
      gathers.push_back(c.all_gather({&buffer, 1}, {.unit = "block", .pass = Pass::Forward}));
    };
    prefetch(0);
    for (std::size_t u = 0; u < kUnits; ++u) {
      if (u + 1 < kUnits) prefetch(u + 1);
      gathers[u].wait();
      ASSERT_TRUE(units[u].complete(c.size())) << "step " << step;
      reductions.push_back(
          c.reduce_scatter(full[u].data(), owned.data(), kShard, {.unit = "block", .pass = Pass::Backward}));
      c.progress();
    }
    for (const Event& e : reductions) e.wait();
    const std::vector<float> sum = sums(c.size(), c.rank() * kShard, kShard, step);
    std::vector<float> expected(kShard);
    for (int u = 0; u < kUnits; ++u)
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += sum[i];
    ASSERT_TRUE(same_bits(owned, expected)) << "step " << step;
    std::vector<double> ranks = {1.0};
    c.all_reduce(ranks, {.unit = "scalars", .pass = Pass::Step});
    ASSERT_EQ(ranks[0], c.size());
  }
}

TEST_P(CommunicatorConformance, FiveHundredStepsRunWithoutAHang) {
  SimOptions options;
  options.chunk_bytes = 600;
  run(options, [](Communicator& c) { steps(c, c.size() <= 4 ? 500 : 100); });
}

TEST_P(CommunicatorConformance, CheckedModeAcceptsWhatIsAlike) {
  SimOptions options;
  options.checked = true;
  run(options, [](Communicator& c) {
    steps(c, 20);
    c.barrier(kLabel);
    c.exchange("text of rank " + std::to_string(c.rank()));
    std::vector<float> data(static_cast<std::size_t>(c.size()));
    c.all_reduce(data.data(), 1, kLabel).wait();
  });
}

}  // namespace regather::conformance
