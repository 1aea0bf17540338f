#include "tensor/ops/gemm.h"

#include <dnnl.h>
#include <omp.h>

#include <algorithm>

#include "tensor/error.h"

namespace regather {
namespace {

enum class Layout : char { Plain = 'N', Transposed = 'T' };

void gemm(Layout layout_a, Layout layout_b, std::int64_t m, std::int64_t n, std::int64_t k, const float* a,
          const float* b, float* c, Into into) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (into == Into::Write) std::fill_n(c, m * n, 0.0F);
    return;
  }
#ifdef __SANITIZE_THREAD__
  omp_set_num_threads(1);  // ThreadSanitizer cannot see OpenMP's synchronisation
#endif
  const auto lead_a = layout_a == Layout::Plain ? k : m, lead_b = layout_b == Layout::Plain ? n : k;
  const dnnl_status_t status = dnnl_sgemm(static_cast<char>(layout_a), static_cast<char>(layout_b), m, n, k, 1.0F, a,
                                          lead_a, b, lead_b, into == Into::Add ? 1.0F : 0.0F, c, n);
  check(status == dnnl_success, "matrix product [{}, {}] x [{}, {}]: oneDNN says status {}", m, k, k, n,
        static_cast<int>(status));
}

}  // namespace

void gemm_nt(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c, Into into) {
  gemm(Layout::Plain, Layout::Transposed, m, n, k, a, b, c, into);
}
void gemm_nn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c, Into into) {
  gemm(Layout::Plain, Layout::Plain, m, n, k, a, b, c, into);
}
void gemm_tn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c, Into into) {
  gemm(Layout::Transposed, Layout::Plain, m, n, k, a, b, c, into);
}

}  // namespace regather
