// How an operation hands over to a device that computes by itself.
#pragma once
#include <type_traits>

#include "tensor/device.h"
#include "tensor/error.h"
#include "tensor/ops/gpu_ops.h"

namespace regather {

// f(what the device computes with on elements of type T); false if that is the CPU's kernels.
template <class T, class F>
bool on_gpu(Device& device, F f) {
  GpuOps* gpu = device.gpu();
  if (gpu == nullptr) return false;
  if constexpr (std::is_same_v<T, float>)
    f(*gpu);
  else
    throw LogicError("operations on a GPU compute on fp32, not on bf16");
  return true;
}

}  // namespace regather
