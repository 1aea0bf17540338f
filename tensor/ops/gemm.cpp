#include "tensor/ops/gemm.h"

#include <dnnl.h>
#include <omp.h>

#include <algorithm>

#include "tensor/error.h"

namespace regather {
namespace {

enum class Layout : char { Plain = 'N', Transposed = 'T' };

void gemm(Layout layout_a, Layout layout_b, std::int64_t m, std::int64_t n, std::int64_t k, const float* a,
          const float* b, float* c, Into into, RowStrides strides) {
  if (m == 0 || n == 0) return;
  const std::int64_t lead_c = strides.c > 0 ? strides.c : n;
  if (k == 0) {
    for (std::int64_t row = 0; into == Into::Write && row < m; ++row) std::fill_n(c + row * lead_c, n, 0.0F);
    return;
  }
#ifdef __SANITIZE_THREAD__
  omp_set_num_threads(1);  // ThreadSanitizer cannot see OpenMP's synchronisation
#endif
  const auto columns_a = layout_a == Layout::Plain ? k : m, lead_b = layout_b == Layout::Plain ? n : k;
  const auto lead_a = strides.a > 0 ? strides.a : columns_a;
  const dnnl_status_t status = dnnl_sgemm(static_cast<char>(layout_a), static_cast<char>(layout_b), m, n, k, 1.0F, a,
                                          lead_a, b, lead_b, into == Into::Add ? 1.0F : 0.0F, c, lead_c);
  check(status == dnnl_success, "matrix product [{}, {}] x [{}, {}]: oneDNN says status {}", m, k, k, n,
        static_cast<int>(status));
}

}  // namespace

void gemm_nt(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c, Into into,
             RowStrides strides) {
  gemm(Layout::Plain, Layout::Transposed, m, n, k, a, b, c, into, strides);
}
void gemm_nn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c, Into into,
             RowStrides strides) {
  gemm(Layout::Plain, Layout::Plain, m, n, k, a, b, c, into, strides);
}
void gemm_tn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c, Into into,
             RowStrides strides) {
  gemm(Layout::Transposed, Layout::Plain, m, n, k, a, b, c, into, strides);
}

}  // namespace regather
