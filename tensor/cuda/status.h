// Errors of the CUDA runtime as errors of ours: which call, and the library's own words. Nothing here shows fmt to
// nvcc, which cannot compile it.
#pragma once

namespace regather::cuda {

void check_launch(const char* kernel);  // of the launch just made

}  // namespace regather::cuda
