// adamw: per element 28 bytes moved (read p, m, v, g; write p, m, v), about 15 flops. sgd: 12 bytes (20 with momentum).
// sum_of_squares, count_nonfinite: 4 bytes read; in double, and in the order of threads and blocks. Limiter: memory
// bandwidth.
#include <algorithm>

#include "tensor/cuda/cuda_ops.h"
#include "tensor/cuda/quads.cuh"
#include "tensor/cuda/reduce.cuh"

namespace regather::cuda {
namespace {

struct AdamW {
  float *p, *m, *v;
  const float* g;
  AdamWFactors f;
  template <bool kAligned>
  __device__ void quad(std::int64_t i, std::int64_t n) const {
    Float4 value = load_quad<kAligned>(p, i, n), first = load_quad<kAligned>(m, i, n),
           second = load_quad<kAligned>(v, i, n);
    const Float4 gradient = load_quad<kAligned>(g, i, n);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float d = gradient.v[k] * f.gradient_scale;
      first.v[k] = first.v[k] * f.beta1 + d * f.one_minus_beta1;
      second.v[k] = second.v[k] * f.beta2 + d * d * f.one_minus_beta2;
      const float denominator = sqrtf(second.v[k]) * f.inverse_root_correction2 + f.eps;
      value.v[k] = value.v[k] * f.decay - f.step_size * (first.v[k] / denominator);
    }
    store_quad<kAligned>(p, i, n, value);
    store_quad<kAligned>(m, i, n, first);
    store_quad<kAligned>(v, i, n, second);
  }
};

struct Sgd {
  float *p, *momentum;
  const float* g;
  float gradient_scale, decay, lr, mu;
  template <bool kAligned>
  __device__ void quad(std::int64_t i, std::int64_t n) const {
    Float4 value = load_quad<kAligned>(p, i, n), d = load_quad<kAligned>(g, i, n);
#pragma unroll
    for (int k = 0; k < 4; ++k) d.v[k] = d.v[k] * gradient_scale + value.v[k] * decay;
    if (momentum) {
      const Float4 before = load_quad<kAligned>(momentum, i, n);
#pragma unroll
      for (int k = 0; k < 4; ++k) d.v[k] = before.v[k] * mu + d.v[k];
      store_quad<kAligned>(momentum, i, n, d);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) value.v[k] -= lr * d.v[k];
    store_quad<kAligned>(p, i, n, value);
  }
};

struct Square {
  using Total = double;
  __device__ double operator()(float x) const { return static_cast<double>(x) * static_cast<double>(x); }
};
struct NotFinite {
  using Total = unsigned long long;
  __device__ unsigned long long operator()(float x) const { return isfinite(x) ? 0U : 1U; }
};

constexpr int kThreads = 256, kMostBlocks = 1024;

template <bool kAligned, class F>
__global__ void __launch_bounds__(kThreads)
    total_kernel(typename F::Total* partial, const float* x, std::int64_t n, F f) {
  using Total = typename F::Total;
  Total total[1] = {0};
  const std::int64_t stride = 4 * static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = 4 * (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x); i < n; i += stride) {
    const Float4 q = load_quad<kAligned>(x, i, n);
#pragma unroll
    for (float v : q.v) total[0] += f(v);
  }
  reduce_block(total, block_shared<Partials<Total, 1>>(), Sum{});
  if (threadIdx.x == 0) store(partial + blockIdx.x, total[0]);
}
// One block.
template <class Total>
__global__ void __launch_bounds__(kThreads) add_totals_kernel(Total* sum, const Total* partial, int n) {
  Total total[1] = {0};
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) total[0] += load(partial + i);
  reduce_block(total, block_shared<Partials<Total, 1>>(), Sum{});
  if (threadIdx.x == 0) store(sum, total[0]);
}

template <class F>
void launch_total(const char* name, typename F::Total* sum, typename F::Total* partial, const float* x, std::int64_t n,
                  F f, cudaStream_t stream) {
  const unsigned blocks = std::clamp<unsigned>(blocks_for(n, 4 * kThreads), 1, kMostBlocks);
  launch(name, all_aligned(x) ? total_kernel<true, F> : total_kernel<false, F>, blocks, kThreads, 0, stream, partial, x,
         n, f);
  launch("add_totals", add_totals_kernel<typename F::Total>, 1, kThreads, 0, stream, sum, partial,
         static_cast<int>(blocks));
}

}  // namespace

void CudaOps::adamw(float* p, float* m, float* v, const float* g, std::int64_t n, const AdamWFactors& factors) {
  launch_quads("adamw", all_aligned(p, m, v, g), AdamW{p, m, v, g, factors}, n, context_.stream());
}
void CudaOps::sgd(float* p, float* momentum, const float* g, std::int64_t n, float gradient_scale, float decay,
                  float lr, float mu) {
  launch_quads("sgd", all_aligned(p, momentum, g), Sgd{p, momentum, g, gradient_scale, decay, lr, mu}, n,
               context_.stream());
}
std::vector<double> CudaOps::sums_of_squares(std::span<const std::span<const float>> arrays,
                                             const std::function<void()>& between) {
  constexpr std::size_t kMost = kGpuResultBytes / sizeof(double);  // waited for together
  double* totals = context_.scratch<double>(kMost + kMostBlocks);
  std::vector<double> sums;
  while (sums.size() < arrays.size()) {
    const auto some = arrays.subspan(sums.size(), std::min(kMost, arrays.size() - sums.size()));
    for (std::size_t i = 0; i < some.size(); ++i) {
      launch_total("sum_of_squares", totals + i, totals + kMost, some[i].data(), std::ssize(some[i]), Square{},
                   context_.stream());
      between();
    }
    const auto* done = static_cast<const double*>(fetch(totals, some.size() * sizeof(double)));
    sums.insert(sums.end(), done, done + some.size());
  }
  return sums;
}
std::int64_t CudaOps::count_nonfinite(const float* x, std::int64_t n) {
  auto* total = context_.scratch<unsigned long long>(1 + kMostBlocks);
  launch_total("count_nonfinite", total, total + 1, x, n, NotFinite{}, context_.stream());
  return static_cast<std::int64_t>(*static_cast<const unsigned long long*>(fetch(total, sizeof *total)));
}

}  // namespace regather::cuda
