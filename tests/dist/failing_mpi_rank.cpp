// failing_mpi_rank SCENARIO: a program of a few "steps" in which rank 1 fails in one way; run by
// communicator_failure.py. Its main is what a program has to do for all ranks to end together: print first, then leave,
// then return the code.
#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <map>
#include <thread>

#include "dist/communicator.h"

namespace regather {
namespace {

using namespace std::chrono_literals;

volatile std::sig_atomic_t interrupted = 0;

void print_line(const std::string& line) {
  const std::string text = line + "\n";  // one write: lines of several ranks do not mix
  if (write(STDOUT_FILENO, text.data(), text.size()) < 0) return;
}

constexpr std::int64_t kShard = 50000;

struct Buffers {
  explicit Buffers(const Communicator& c) : full(static_cast<std::size_t>(c.size() * kShard)), owned(kShard) {}
  std::vector<float> full, owned;
};

void gather(Communicator& c, Buffers& b, const char* detail = "block 2") {
  const GatherBuffer buffer{b.full.data(), kShard, DType::F32};
  c.all_gather({&buffer, 1}, {.unit = "block", .pass = Pass::Forward, .detail = detail}).wait();
}
void reduce(Communicator& c, Buffers& b) {
  c.reduce_scatter(b.full.data(), b.owned.data(), kShard,
                   {.unit = "block", .pass = Pass::Backward, .detail = "block 2"})
      .wait();
}

// What rank 1 does at step 3, before its collectives.
using Fault = void (*)(Communicator&, Buffers&);
const std::map<std::string, Fault, std::less<>> kFaults = {
    {"none", [](Communicator&, Buffers&) {}},
    {"throw", [](Communicator&, Buffers&) { throw Error("the loss is nan"); }},
    {"memory", [](Communicator&, Buffers&) { throw OutOfMemory("over the limit"); }},
    // Its part of one collective is under way when it fails.
    {"throw_pending",
     [](Communicator& c, Buffers& b) {
       const GatherBuffer buffer{b.full.data(), kShard, DType::F32};
       const Event event = c.all_gather({&buffer, 1}, {.unit = "block", .pass = Pass::Forward, .detail = "block 2"});
       throw Error("the loss is nan");
     }},
    {"kill", [](Communicator&, Buffers&) { std::raise(SIGKILL); }},
    {"stop", [](Communicator&, Buffers&) { std::raise(SIGSTOP); }},
    {"skip", [](Communicator& c, Buffers& b) { reduce(c, b); }},
    {"sleep", [](Communicator&, Buffers&) { std::this_thread::sleep_for(1s); }},
};

void steps(Communicator& c, Buffers& b, const std::string& scenario) {
  for (int step = 1; step <= 5; ++step) {
    c.set_where(fmt::format("step {}", step));
    with_context([&] { return c.where(); },
                 [&] {
                   if (step == 3 && c.rank() == 1) kFaults.at(scenario)(c, b);
                   gather(c, b);
                   reduce(c, b);
                   std::vector<double> scalars(1);
                   c.all_reduce(scalars, {.unit = "scalars", .pass = Pass::Step});
                 });
  }
}

void body(Communicator& c, Buffers& b, const std::string& scenario) {
  if (scenario == "configuration") {
    const std::vector<std::string> hashes = c.exchange(c.rank() == 1 ? "layers: 6" : "layers: 4");
    for (std::size_t r = 0; r < hashes.size(); ++r)
      if (hashes[r] != hashes[0])
        throw UsageError(fmt::format("rank {} has {}, rank 0 has {}", r, hashes[r], hashes[0]));
  }
  if (scenario == "terminated") {  // every rank gets SIGTERM while rank 1 is late: the step is finished
    if (c.rank() == 1) std::this_thread::sleep_for(1500ms);
    std::raise(SIGTERM);
    return steps(c, b, "none");
  }
  steps(c, b, scenario);
}

int run(const std::string& scenario) {
  CommunicatorOptions options;
  options.timeout = 2s;
  options.checked = scenario == "checked";
  options.interrupt = &interrupted;
  std::signal(SIGTERM, [](int) { interrupted = 1; });
  int rank = 0;
  options.warn = [&rank](const std::string& line) { print_line(fmt::format("rank {}: warning: {}", rank, line)); };
  const auto communicator = make_mpi_communicator(options);
  rank = communicator->rank();
  Buffers buffers(*communicator);  // outlive leave()
  try {
    body(*communicator, buffers, scenario == "checked" ? "skip" : scenario);
  } catch (const Error& e) {
    print_line(fmt::format("rank {}: {}", rank, e.what()));
    communicator->leave(e.what(), e.code());
    return static_cast<int>(e.code());
  }
  print_line(fmt::format("rank {}: done", rank));
  return 0;
}

}  // namespace
}  // namespace regather

int main(int argc, char** argv) { return argc == 2 ? regather::run(argv[1]) : 2; }
