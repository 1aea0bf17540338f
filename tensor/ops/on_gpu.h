// How an operation hands over to a device that computes by itself.
#pragma once
#include "tensor/device.h"
#include "tensor/ops/gpu_ops.h"

namespace regather {

// f(what the device computes with); false if that is the CPU's kernels.
template <class F>
bool on_gpu(Device& device, F f) {
  GpuOps* gpu = device.gpu();
  if (gpu == nullptr) return false;
  f(*gpu);
  return true;
}

}  // namespace regather
