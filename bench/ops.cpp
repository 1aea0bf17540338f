// Every operation against what this machine can do, measured in the same run: products and attention against the rate
// of a large matrix product, the others against the bandwidth of a copy between arrays too large for the caches.
//   bench_ops --benchmark_filter='attention.*'
// Columns: rate in GFLOP/s or GB/s, whichever limits the operation by what it declares of itself (Op::work), and
// of_limit. Use the ratio: the rates of a shared machine vary.
#include <benchmark/benchmark.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <memory>

#include "tensor/block.h"
#include "tensor/ops/add.h"
#include "tensor/ops/attention.h"
#include "tensor/ops/dropout.h"
#include "tensor/ops/embedding.h"
#include "tensor/ops/gelu.h"
#include "tensor/ops/layer_norm.h"
#include "tensor/ops/linear.h"
#include "tensor/ops/linear_cross_entropy.h"
#include "tensor/ops/optimizer.h"
#include "tensor/ops/rms_norm.h"
#include "tensor/ops/rope.h"
#include "tensor/ops/swiglu.h"
#include "tensor/recorder.h"
#include "tensor/work.h"

namespace regather {
namespace {

double now() {
  timespec t{};
  clock_gettime(omp_get_max_threads() > 1 ? CLOCK_MONOTONIC : CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

const MachineLimits& limits() {
  static const MachineLimits measured = measure_limits(std::chrono::milliseconds(250), now);
  return measured;
}

class Params final : public ParamSource {
 public:
  Params(Device& device, const std::vector<Shape>& shapes) {
    std::int64_t n = 0;
    for (const Shape& s : shapes) {
      table_.push_back({.name = fmt::format("p{}", table_.size()), .shape = s});
      offsets_.push_back(n);
      n += s.numel();
    }
    flat_ = Buffer(device.memory, n * 4, Tag::Gathered);
    for (std::int64_t i = 0; i < n; ++i) flat_.data<float>()[i] = 0.02F * static_cast<float>(i % 17 - 8);
    gradients = std::make_unique<UnitGradients>(device, offsets_, n, Tag::Gradients);
  }
  const std::vector<ParamInfo>& table() const override { return table_; }
  const void* data(int i) override { return flat_.data<float>() + offsets_[static_cast<std::size_t>(i)]; }
  DType dtype() const override { return DType::F32; }
  std::unique_ptr<UnitGradients> gradients;

 private:
  std::vector<ParamInfo> table_;
  std::vector<std::int64_t> offsets_;
  Buffer flat_;
};

enum class Pass { Forward, Backward };

struct Subject {
  std::string name;
  std::vector<Shape> inputs;
  std::vector<Shape> params;
  std::function<Tensor(Run&, const Activations&)> apply;
  std::vector<Pass> passes = {Pass::Forward, Pass::Backward};
  int vocab = 0;  // the last input is int32 below it, if positive
};

Tensor filled(Device& device, const Shape& shape, int vocab) {
  Tensor t(device.memory, shape, Tag::Activations, vocab > 0 ? DType::I32 : DType::F32);
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    const std::int64_t mixed = i * 7919 % 2003;
    if (vocab > 0)
      t.fresh<std::int32_t>()[i] = static_cast<std::int32_t>(mixed % vocab);
    else
      t.fresh()[i] = static_cast<float>(mixed - 1001) * 1e-3F;
  }
  return t;
}

// Times f, which returns the seconds that count. work: known after one execution, which also warms the memory up.
void repeat(benchmark::State& state, const Work& work, const std::function<double()>& f) {
  f();
  double seconds = 0, times = 0;
  for (auto _ : state) {
    const double once = f();
    state.SetIterationTime(once);
    seconds += once;
    ++times;
  }
  const bool flops = limited_by(work, limits()) == LimitedBy::Flops;
  state.counters[flops ? "GFLOP/s" : "GB/s"] = (flops ? work.flops : work.bytes) * times / seconds * 1e-9;
  state.counters["of_limit"] = least_seconds(work, limits()) * times / seconds;
}

void measure(benchmark::State& state, const Subject& s, Pass pass) {
  CpuDevice device;
  Params params(device, s.params);
  const ParamView view(params);
  Gradients gradients;
  gradients.append(*params.gradients, static_cast<int>(s.params.size()));
  Activations in;
  for (std::size_t i = 0; i < s.inputs.size(); ++i)
    in.push_back(filled(device, s.inputs[i], i + 1 == s.inputs.size() ? s.vocab : 0));
  const auto seconds = [&] {
    Tape tape(device, keep_all());
    Run run{device, view, &tape};
    Activations x;
    for (const Tensor& t : in) x.push_back(tape.input(t, t.dtype() == DType::F32));
    double begin = now();
    Tensor y = s.apply(run, x);
    if (pass == Pass::Forward) return now() - begin;
    tape.outputs({y});
    Tensor dy = filled(device, y.shape(), 0);
    begin = now();
    const Activations dx = tape.backward(view, {std::move(dy)}, gradients);
    return now() - begin;
  };
  Recorder recorder;
  device.recorder = &recorder;
  seconds();
  device.recorder = nullptr;
  const auto activity = pass == Pass::Forward ? Recorder::Activity::Forward : Recorder::Activity::Backward;
  Work work;
  for (const Recorder::Interval& i : recorder.recording().intervals)
    if (i.activity == activity) work = i.work;
  repeat(state, work, seconds);
}

Subject linear_subject(const char* name, std::int64_t rows, std::int64_t in, std::int64_t out) {
  return {name, {{rows, in}}, {{out, in}, {out}}, [](Run& r, const Activations& a) { return linear(r, a[0], 0, 1); }};
}
Subject attention_subject(std::int64_t tokens, float rate) {
  return {fmt::format("attention{}/{}", rate > 0 ? "_dropout" : "", tokens),
          {{1, tokens, 3 * 8 * 64}},
          {},
          [rate](Run& r, const Activations& a) { return attention(r, a[0], 8, 8, rate); }};
}

std::vector<Subject> subjects() {
  constexpr std::int64_t kRows = 4096, kC = 768, kF = 3072;
  std::vector<Subject> all = {
      linear_subject("linear/qkv", 1024, kC, 3 * kC),
      linear_subject("linear/up", 1024, kC, kF),
      linear_subject("linear/down", 1024, kF, kC),
      {"layer_norm",
       {{kRows, kC}},
       {{kC}, {kC}},
       [](Run& r, const Activations& a) { return layer_norm(r, a[0], 0, 1); }},
      {"rms_norm", {{kRows, kC}}, {{kC}}, [](Run& r, const Activations& a) { return rms_norm(r, a[0], 0); }},
      {"gelu", {{kRows, kF}}, {}, [](Run& r, const Activations& a) { return gelu(r, a[0]); }},
      {"swiglu", {{kRows, kF}, {kRows, kF}}, {}, [](Run& r, const Activations& a) { return swiglu(r, a[0], a[1]); }},
      {"add",
       {{kRows, kC}, {kRows, kC}},
       {},
       [](Run& r, const Activations& a) { return add(r, a[0], a[1]); },
       {Pass::Forward}},  // its backward passes the gradient on
      {"dropout", {{4, kRows / 4, kC}}, {}, [](Run& r, const Activations& a) { return dropout(r, a[0], 0.1F); }},
      {"rope", {{4, kRows / 4, 3 * kC}}, {}, [](Run& r, const Activations& a) { return rope(r, a[0], 12, 12, 10000); }},
      {"embedding",
       {{4, kRows / 4}},
       {{50257, kC}, {1024, kC}},
       [](Run& r, const Activations& a) { return embedding(r, a[0], 0, 1); },
       {Pass::Forward, Pass::Backward},
       50257},
      {"linear_cross_entropy",
       {{1, 512, kC}, {1, 512}},
       {{50257, kC}},
       [](Run& r, const Activations& a) { return linear_cross_entropy(r, a[0], a[1], 0); },
       {Pass::Backward},  // fused with its forward
       50257},
  };
  for (std::int64_t tokens : {512, 1024, 2048, 4096}) all.push_back(attention_subject(tokens, 0));
  all.push_back(attention_subject(1024, 0.1F));
  return all;
}

void measure_flat(benchmark::State& state, const std::function<void(float*, float*, float*, float*, std::int64_t)>& f,
                  double bytes) {
  Allocator memory;
  constexpr std::int64_t kN = std::int64_t{1} << 24;
  const Buffer flat(memory, 4 * kN * 4, Tag::Optimizer);
  float* x = flat.data<float>();
  std::fill_n(x, 4 * kN, 0.01F);
  repeat(state, {.bytes = bytes * kN}, [&] {
    const double begin = now();
    f(x, x + kN, x + 2 * kN, x + 3 * kN, kN);
    return now() - begin;
  });
}

void add_all() {
  for (const Subject& s : subjects()) {
    const auto add_one = [&](Pass pass, const char* suffix) {
      benchmark::RegisterBenchmark((s.name + suffix).c_str(),
                                   [s, pass](benchmark::State& state) { measure(state, s, pass); })
          ->UseManualTime()
          ->MinTime(0.2)
          ->Unit(benchmark::kMillisecond);
    };
    for (const Pass pass : s.passes) add_one(pass, pass == Pass::Forward ? "/forward" : "/backward");
  }
  const auto add_flat = [](const char* name, double bytes, auto f) {
    benchmark::RegisterBenchmark(name, [=](benchmark::State& state) { measure_flat(state, f, bytes); })
        ->UseManualTime()
        ->MinTime(0.2)
        ->Unit(benchmark::kMillisecond);
  };
  add_flat("adamw", kAdamwBytes, [](float* p, float* m, float* v, float* g, std::int64_t n) {
    adamw(p, m, v, g, n, {.lr = 1e-4F, .weight_decay = 0.1F, .step = 3});
  });
  add_flat("sgd", kSgdBytes,
           [](float* p, float*, float*, float* g, std::int64_t n) { sgd(p, nullptr, g, n, {.lr = 1e-4F}); });
  add_flat("sum_of_squares", kSumOfSquaresBytes,
           [](float*, float*, float*, float* g, std::int64_t n) { benchmark::DoNotOptimize(sum_of_squares(g, n)); });
  add_flat("count_nonfinite", kCountNonfiniteBytes,
           [](float*, float*, float*, float* g, std::int64_t n) { benchmark::DoNotOptimize(count_nonfinite(g, n)); });
}

}  // namespace
}  // namespace regather

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  if (!std::getenv("OMP_NUM_THREADS")) omp_set_num_threads(1);
  std::printf("limits: %.1f GFLOP/s (matrix product), %.1f GB/s (sum of two arrays into one)\n",
              regather::limits().flops * 1e-9, regather::limits().bytes * 1e-9);
  regather::add_all();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
