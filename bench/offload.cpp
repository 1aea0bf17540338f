// What copy streams are worth: offloaded values copied by streams of their own, beside the computation, against the
// same copies in between the computation. One rank, so that a core is left for the copies. `none` moves everything that
// it keeps, `full` the inputs of its blocks.
//   build/cpu/bench/bench_offload
#include <fmt/format.h>

#include "bench/step_time.h"

namespace {

using namespace regather;

// A CPU whose copies are done when they are asked for.
class CopiesInBetween final : public Device {
 public:
  DeviceKind kind() const override { return DeviceKind::Cpu; }
  Event record(Stream) override { return {}; }
  void wait(Stream, const Event& event) override { event.wait(); }
  void copy(Stream, void* to, const void* from, std::int64_t bytes) override {
    cpu_.copy(Stream::Compute, to, from, bytes);
  }
  void zero(Stream, void* to, std::int64_t bytes) override { cpu_.zero(Stream::Compute, to, bytes); }
  void add(Stream, float* sum, const float* a, const float* b, std::int64_t n) override {
    cpu_.add(Stream::Compute, sum, a, b, n);
  }
  void add(Stream, Bf16* sum, const Bf16* a, const Bf16* b, std::int64_t n) override {
    cpu_.add(Stream::Compute, sum, a, b, n);
  }
  void round(Stream, Bf16* to, const float* from, std::int64_t n) override { cpu_.round(Stream::Compute, to, from, n); }
  void write(Stream stream, void* to, const void* from, std::int64_t bytes) override { copy(stream, to, from, bytes); }
  void read(Stream stream, void* to, const void* from, std::int64_t bytes) override { copy(stream, to, from, bytes); }

 private:
  CpuDevice cpu_;
};

}  // namespace

int main() {
  fmt::print("{:>7} {:>15} {:>16} {:>18} {:>9} {:>7} {:>12} {:>8} {:>8}\n", "policy", "not moved, ms", "in between, ms",
             "copy streams, ms", "shorter", "spread", "stalled, ms", "MiB out", "GB/s");
  for (const char* policy : {"full", "none"}) {
    bench::StepTime stays;
    stays.model = {.type = "gpt2", .layers = 6, .hidden = 256, .heads = 4, .vocab = 256, .max_sequence = 512};
    stays.policy.policy = policy;
    bench::StepTime beside = stays;
    beside.policy.offload.names = {"all"};
    bench::StepTime between = beside;
    between.device = [] { return std::make_unique<CopiesInBetween>(); };
    const auto of = bench::measure_in_turn({stays, between, beside}, 1, {});
    const CopyCounts& moved = of[2].to_host;
    const double seconds = bench::median(of[2].seconds), slower = bench::median(of[1].seconds);
    fmt::print("{:>7} {:>15.1f} {:>16.1f} {:>18.1f} {:>8.1f}% {:>6.1f}% {:>12.2f} {:>8.1f} {:>8.1f}\n", policy,
               1e3 * bench::median(of[0].seconds), 1e3 * slower, 1e3 * seconds, 100 * (1 - seconds / slower),
               100 * std::max(bench::spread(of[1].seconds), bench::spread(of[2].seconds)),
               1e3 * bench::median(of[2].stalled),
               static_cast<double>(moved.bytes) / (bench::kRounds * (beside.steps + 1)) / (1 << 20),
               static_cast<double>(moved.bytes) / moved.seconds / 1e9);
  }
}
