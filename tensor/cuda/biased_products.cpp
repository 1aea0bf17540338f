#include "tensor/cuda/biased_products.h"

#include <algorithm>

#include "tensor/cuda/status.h"
#include "tensor/error.h"

namespace regather::cuda {
namespace {

constexpr std::uint32_t kVectorBytes = 16;

std::uint32_t alignment_of(const void* address) {
  const auto a = reinterpret_cast<std::uintptr_t>(address);
  return std::min(kVectorBytes, static_cast<std::uint32_t>(a & (~a + 1) & 0xFFFF'FFFF));
}

template <class T>
void set(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check_status(cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof value),
               "cublasLtMatmulDescSetAttribute");
}

struct Preference {
  cublasLtMatmulPreference_t handle = nullptr;
  Preference() { check_status(cublasLtMatmulPreferenceCreate(&handle), "cublasLtMatmulPreferenceCreate"); }
  ~Preference() { static_cast<void>(cublasLtMatmulPreferenceDestroy(handle)); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  template <class T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, const T& value) const {
    check_status(cublasLtMatmulPreferenceSetAttribute(handle, attribute, &value, sizeof value),
                 "cublasLtMatmulPreferenceSetAttribute");
  }
};

}  // namespace

BiasedProducts::BiasedProducts(cudaStream_t stream, void* workspace, std::int64_t workspace_bytes)
    : stream_(stream), workspace_(workspace), workspace_bytes_(static_cast<std::size_t>(workspace_bytes)) {
  check_status(cublasLtCreate(&handle_), "cublasLtCreate");
}
BiasedProducts::~BiasedProducts() {
  choices_.clear();
  if (handle_) static_cast<void>(cublasLtDestroy(handle_));
}
BiasedProducts::Choice::~Choice() {
  for (const cublasLtMatrixLayout_t layout : {x, w, y})
    if (layout) static_cast<void>(cublasLtMatrixLayoutDestroy(layout));
  if (product) static_cast<void>(cublasLtMatmulDescDestroy(product));
}

// The library is column-major: a row-major matrix is its transpose there. y^T [n, m] = w x^T, and the row that each row
// of y gets is the column that each column of y^T gets, as its epilogue has it.
void BiasedProducts::choose(const Kind& kind, const void* bias, Choice& choice) const {
  const cudaDataType type = kind.dtype == DType::BF16 ? CUDA_R_16BF : CUDA_R_32F;
  const auto layout = [&](cublasLtMatrixLayout_t& of, std::int64_t rows, std::int64_t cols) {
    check_status(
        cublasLtMatrixLayoutCreate(&of, type, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(cols), rows),
        "cublasLtMatrixLayoutCreate");
  };
  check_status(cublasLtMatmulDescCreate(&choice.product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  set(choice.product, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  set(choice.product, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
  set(choice.product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type);
  set(choice.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  layout(choice.w, kind.k, kind.n);
  layout(choice.x, kind.k, kind.m);
  layout(choice.y, kind.n, kind.m);

  const Preference preference;
  preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes_);
  // A sum that is split is added up in fp32, too, and rounded once.
  preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, kind.w_aligned);
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, kind.x_aligned);
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, kind.y_aligned);
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, kind.y_aligned);
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  check_status(cublasLtMatmulAlgoGetHeuristic(handle_, choice.product, choice.w, choice.x, choice.y, choice.y,
                                              preference.handle, 1, &found, &count),
               "cublasLtMatmulAlgoGetHeuristic");
  check_status(count == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : found.state, "cublasLtMatmulAlgoGetHeuristic");
  choice.algorithm = found.algo;
}

void BiasedProducts::multiply(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype, const Arrays& arrays) {
  const auto [x, w, bias, y] = arrays;
  const Kind kind{m, n, k, dtype, alignment_of(x), alignment_of(w), std::min(alignment_of(y), alignment_of(bias))};
  auto at = choices_.find(kind);
  if (at == choices_.end()) {
    at = choices_.try_emplace(kind).first;
    try {
      choose(kind, bias, at->second);
    } catch (...) {
      choices_.erase(at);
      throw;
    }
  }
  const Choice& choice = at->second;
  set(choice.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  const float one = 1, zero = 0;
  check_status(cublasLtMatmul(handle_, choice.product, &one, w, choice.w, x, choice.x, &zero, y, choice.y, y, choice.y,
                              &choice.algorithm, workspace_, workspace_bytes_, stream_),
               "cublasLtMatmul");
}

}  // namespace regather::cuda
