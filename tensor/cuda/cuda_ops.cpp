#include "tensor/cuda/cuda_ops.h"

#include "tensor/cuda/biased_products.h"
#include "tensor/cuda/status.h"
#include "tensor/cuda/streams.h"
#include "tensor/error.h"
#include "tensor/ops/gemm.h"

namespace regather::cuda {
namespace {

static_assert(sizeof(Fault) == kGpuFaultBytes);

std::string text_of(const Fault& f) {
  if (f.kind == kTokenOutsideVocabulary)
    return fmt::format("embedding: token {} at sequence {}, position {} is outside the vocabulary [0, {})", f.value,
                       f.first, f.second, f.limit);
  return fmt::format("linear_cross_entropy: target {} in row {} is neither -1 nor in the vocabulary [0, {})", f.value,
                     f.first, f.limit);
}

}  // namespace

OpContext::OpContext(Allocator& memory, cudaStream_t compute)
    : stream_(compute),
      scratch_(memory, kGpuScratchBytes, Tag::Workspace),
      faults_(memory, sizeof(Fault), Tag::Workspace) {
  check_status(cudaMemsetAsync(faults_.data(), 0, sizeof(Fault), stream_), "cudaMemsetAsync");
}

CudaOps::CudaOps(Allocator& memory, Streams& streams)
    : streams_(streams),
      context_(memory, streams[Stream::Compute]),
      fp32_(context_),
      bf16_(context_),
      blas_workspace_(memory, kGpuProductsBytes, Tag::Workspace),
      results_(memory, kGpuResultBytes, Tag::Host),
      found_(memory, kGpuFaultBytes, Tag::Host),
      biased_products_(std::make_unique<BiasedProducts>(context_.stream(), blas_workspace_.data(), kGpuProductsBytes)) {
  check_status(cublasCreate(&blas_), "cublasCreate");
  check_status(cublasSetStream(blas_, context_.stream()), "cublasSetStream");
  check_status(cublasSetWorkspace(blas_, blas_workspace_.data(), kGpuProductsBytes), "cublasSetWorkspace");
  // A sum that is split is added up in fp32, too, and rounded once.
  check_status(cublasSetMathMode(blas_, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION), "cublasSetMathMode");
}

CudaOps::~CudaOps() {
  if (blas_) static_cast<void>(cublasDestroy(blas_));
}

const void* CudaOps::fetch(const void* from, std::size_t bytes) {
  check_status(cudaMemcpyAsync(results_.data(), from, bytes, cudaMemcpyDeviceToHost, context_.stream()),
               "cudaMemcpyAsync");
  streams_.record(Stream::Compute).wait();
  return results_.data();
}

Event CudaOps::fetch_faults() {
  check_status(
      cudaMemcpyAsync(found_.data(), context_.faults(), sizeof(Fault), cudaMemcpyDeviceToHost, context_.stream()),
      "cudaMemcpyAsync");
  return streams_.record(Stream::Compute);
}

void CudaOps::throw_faults() {
  const Fault fault = *found_.data<Fault>();
  if (fault.kind == 0) return;
  check_status(cudaMemsetAsync(context_.faults(), 0, sizeof(Fault), context_.stream()), "cudaMemsetAsync");
  throw Error(text_of(fault));
}

// cuBLAS is column-major: a row-major matrix is its transpose there, and C^T = op(B)^T op(A)^T.
void CudaOps::gemm(Layout a_layout, Layout b_layout, const Sizes& sizes, const ConstElements& a, const ConstElements& b,
                   const Elements& c, Into into, RowStrides strides, float scale) {
  const auto [m, n, k] = sizes;
  check(a.dtype == b.dtype && (c.dtype == a.dtype || c.dtype == DType::F32),
        "matrix product on CUDA: {} times {} into {}; factors have one type, and the result that or fp32",
        name_of(a.dtype), name_of(b.dtype), name_of(c.dtype));
  if (m == 0 || n == 0) return;
  const bool a_plain = a_layout == Layout::Plain, b_plain = b_layout == Layout::Plain;
  const std::int64_t a_stride = strides.a != 0 ? strides.a : a_plain ? k : m, c_stride = strides.c != 0 ? strides.c : n;
  if (k == 0) {
    const std::size_t element = size_of(c.dtype);
    if (into == Into::Write)
      check_status(
          cudaMemset2DAsync(c.data, static_cast<std::size_t>(c_stride) * element, 0,
                            static_cast<std::size_t>(n) * element, static_cast<std::size_t>(m), context_.stream()),
          "cudaMemset2DAsync");
    return;
  }
  const auto type = [](DType t) { return t == DType::BF16 ? CUDA_R_16BF : CUDA_R_32F; };
  const float beta = into == Into::Add ? 1.0F : 0.0F;
  check_status(cublasGemmEx_64(blas_, b_plain ? CUBLAS_OP_N : CUBLAS_OP_T, a_plain ? CUBLAS_OP_N : CUBLAS_OP_T, n, m, k,
                               &scale, b.data, type(b.dtype), b_plain ? n : k, a.data, type(a.dtype), a_stride, &beta,
                               c.data, type(c.dtype), c_stride, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
               "cublasGemmEx");
}
void CudaOps::linear(std::int64_t m, std::int64_t n, std::int64_t k, ConstElements x, ConstElements w,
                     ConstElements bias, Elements y) {
  check(x.dtype == y.dtype && w.dtype == y.dtype && bias.dtype == y.dtype,
        "linear layer on CUDA: {} times {} plus {} into {}; they have one type", name_of(x.dtype), name_of(w.dtype),
        name_of(bias.dtype), name_of(y.dtype));
  check(k > 0, "linear layer on CUDA: rows of x have no elements");
  if (m > 0 && n > 0) biased_products_->multiply(m, n, k, y.dtype, {x.data, w.data, bias.data, y.data});
}
void CudaOps::gemm_nt(std::int64_t m, std::int64_t n, std::int64_t k, ConstElements a, ConstElements b, Elements c,
                      Into into, RowStrides strides, float scale) {
  gemm(Layout::Plain, Layout::Transposed, {m, n, k}, a, b, c, into, strides, scale);
}
void CudaOps::gemm_nn(std::int64_t m, std::int64_t n, std::int64_t k, ConstElements a, ConstElements b, Elements c,
                      Into into, RowStrides strides, float scale) {
  gemm(Layout::Plain, Layout::Plain, {m, n, k}, a, b, c, into, strides, scale);
}
void CudaOps::gemm_tn(std::int64_t m, std::int64_t n, std::int64_t k, ConstElements a, ConstElements b, Elements c,
                      Into into, RowStrides strides, float scale) {
  gemm(Layout::Transposed, Layout::Plain, {m, n, k}, a, b, c, into, strides, scale);
}

}  // namespace regather::cuda
