// What tests of the emulator share: a machine whose findings are looked at in the end, and short forms of the calls.
#pragma once
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "tests/cuda_emu/machine.h"
#include "tests/cuda_emu/seeds.h"

namespace cuda_emu::testing {

inline void ok(cudaError_t status) { ASSERT_EQ(status, cudaSuccess); }

inline cudaStream_t new_stream() {
  cudaStream_t stream = nullptr;
  ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}
inline cudaEvent_t new_event() {
  cudaEvent_t event = nullptr;
  ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}
template <class T = float>
T* on_device(std::size_t n) {
  void* data = nullptr;
  ok(cudaMalloc(&data, n * sizeof(T)));
  return static_cast<T*>(data);
}
template <class T = float>
T* pinned(std::size_t n) {
  void* data = nullptr;
  ok(cudaHostAlloc(&data, n * sizeof(T), cudaHostAllocDefault));
  return static_cast<T*>(data);
}
// 0, 1, 2, ... in pinned memory.
template <class T = float>
T* counting(std::size_t n) {
  T* data = pinned<T>(n);
  std::iota(data, data + n, T{0});
  return data;
}
template <class T>
void upload(T* to, const T* from, std::size_t n, cudaStream_t stream) {
  ok(cudaMemcpyAsync(to, from, n * sizeof(T), cudaMemcpyHostToDevice, stream));
}
template <class T>
T* counting_on_device(std::size_t n, cudaStream_t stream) {
  T* data = on_device<T>(n);
  upload(data, counting<T>(n), n, stream);
  return data;
}
// After everything in the stream.
template <class T>
std::vector<T> download(const T* from, std::size_t n, cudaStream_t stream) {
  T* data = pinned<T>(n);
  ok(cudaMemcpyAsync(data, from, n * sizeof(T), cudaMemcpyDeviceToHost, stream));
  cudaStreamSynchronize(stream);
  return {data, data + n};
}
template <class T>
std::vector<T> counted(std::size_t n) {
  std::vector<T> values(n);
  std::iota(values.begin(), values.end(), T{0});
  return values;
}

// The findings so far are these, each by a part of its text.
inline void expect_findings(Machine& machine, const std::vector<std::string>& parts) {
  const std::vector<std::string> found = machine.take_findings();
  EXPECT_EQ(found.size(), parts.size());
  for (std::size_t i = 0; i < found.size(); ++i)
    EXPECT_TRUE(i < parts.size() && found[i].find(parts[i]) != std::string::npos) << found[i];
}
inline bool finds(Machine& machine, const std::string& part) {
  for (const std::string& finding : machine.take_findings())
    if (finding.find(part) != std::string::npos) return true;
  return false;
}

// f, in a process of its own, is a race that ThreadSanitizer names. The process begins anew: in a copy of one that has
// fibers ThreadSanitizer sees nothing.
template <class F>
void expect_race(F f) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        f();
        std::exit(0);
      },
      ::testing::ExitedWithCode(66), "ThreadSanitizer: data race");
}

class Seeds : public ::testing::TestWithParam<int> {
 protected:
  Options options() const { return {.seed = static_cast<std::uint64_t>(GetParam())}; }
};

}  // namespace cuda_emu::testing
