// Messages in flight of the mpi backend, and MPI's error codes as errors. Included by that backend only.
#pragma once
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "dist/transport.h"

namespace regather {

inline void check_mpi(int code, std::string_view call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(fmt::format("{}: {}", call, text));
}

// Messages in flight. A received size is checked: MPI accepts a shorter message silently.
class Requests {
 public:
  void receive(void* to, std::int64_t bytes, int from, int tag, MPI_Comm comm) {
    add(static_cast<int>(bytes));
    check_mpi(MPI_Irecv(to, static_cast<int>(bytes), MPI_BYTE, from, tag, comm, &requests_.back()), "MPI_Irecv");
  }
  void send(const void* from, std::int64_t bytes, int to, int tag, MPI_Comm comm) {
    add(kSent);
    check_mpi(MPI_Isend(from, static_cast<int>(bytes), MPI_BYTE, to, tag, comm, &requests_.back()), "MPI_Isend");
  }
  bool empty() const { return requests_.empty(); }
  TransferProgress poll() {
    if (left_ == 0) return TransferProgress::Done;
    int count = 0;
    indices_.resize(requests_.size());
    statuses_.resize(requests_.size());
    const int code =
        MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, indices_.data(), statuses_.data());
    if (code == MPI_ERR_IN_STATUS) {
      for (int i = 0; i < count; ++i) check_mpi(statuses_[static_cast<std::size_t>(i)].MPI_ERROR, "MPI_Testsome");
    }
    check_mpi(code, "MPI_Testsome");
    for (int i = 0; i < count; ++i) {
      const MPI_Status& status = statuses_[static_cast<std::size_t>(i)];
      const int expected = expected_[static_cast<std::size_t>(indices_[static_cast<std::size_t>(i)])];
      int received = expected;
      if (expected != kSent) check_mpi(MPI_Get_count(&status, MPI_BYTE, &received), "MPI_Get_count");
      if (received != expected)
        throw Error(
            fmt::format("rank {} sent {} bytes where this rank expects {}", status.MPI_SOURCE, received, expected));
    }
    left_ -= count;
    return left_ == 0 ? TransferProgress::Done : count > 0 ? TransferProgress::Some : TransferProgress::None;
  }

 private:
  static constexpr int kSent = -1;
  void add(int expected) {
    requests_.push_back(MPI_REQUEST_NULL);
    expected_.push_back(expected);
    ++left_;
  }
  std::vector<MPI_Request> requests_;
  std::vector<int> expected_, indices_;
  std::vector<MPI_Status> statuses_;
  int left_ = 0;
};

}  // namespace regather
