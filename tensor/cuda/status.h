// Errors of the CUDA libraries as errors of ours: which call, and the library's own words. Out of memory is
// OutOfMemory. Nothing here shows fmt to nvcc, which cannot compile it.
#pragma once
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

namespace regather::cuda {

void check_status(cudaError_t status, const char* call);
void check_status(cublasStatus_t status, const char* call);
void check_launch(const char* kernel);  // of the launch just made
// "; an illegal memory access was encountered (cudaErrorIllegalAddress)": for the errors of libraries, which on a
// device that has failed only say that nothing runs there. Empty: the runtime has found nothing.
std::string word_of_runtime();

// "channels of a norm: 9000; on CUDA there are at most 8192"
void require_at_most(const char* what, std::int64_t value, std::int64_t most);

}  // namespace regather::cuda
