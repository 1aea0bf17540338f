// What really went through MPI: its profiling interface, as an independent count of the bytes that the ledger claims.
// Include it in exactly one source of an mpi test; it replaces MPI's functions in that program. Counted per rank:
// messages of communicators named "regather data" (others carry no data of a step), and calls of MPI's own collectives
// on any communicator.
#pragma once
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <cstdint>
#include <string_view>

namespace regather::pmpi {

struct Count {
  std::int64_t sends = 0, sent_bytes = 0, receives = 0, received_bytes = 0;
  std::int64_t library_collectives = 0;
};

// Since the last reset(). A program's only count: MPI's functions have no place to put another.
inline Count& count() {
  static Count counts;
  return counts;
}
inline void reset() { count() = {}; }

inline bool carries_data(MPI_Comm comm) {
  char name[MPI_MAX_OBJECT_NAME] = {};
  int length = 0;
  PMPI_Comm_get_name(comm, name, &length);
  return std::string_view(name, static_cast<std::size_t>(length)) == "regather data";
}
inline std::int64_t bytes_of(int elements, MPI_Datatype type) {
  int size = 0;
  PMPI_Type_size(type, &size);
  return std::int64_t{elements} * size;
}
inline void sent(int elements, MPI_Datatype type, MPI_Comm comm) {
  if (!carries_data(comm)) return;
  ++count().sends;
  count().sent_bytes += bytes_of(elements, type);
}
inline void received(int elements, MPI_Datatype type, MPI_Comm comm) {
  if (!carries_data(comm)) return;
  ++count().receives;
  count().received_bytes += bytes_of(elements, type);
}

}  // namespace regather::pmpi

extern "C" {

// Every way of sending and receiving that a backend could take.
int MPI_Send(const void* data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm) {
  regather::pmpi::sent(n, type, comm);
  return PMPI_Send(data, n, type, to, tag, comm);
}
int MPI_Ssend(const void* data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm) {
  regather::pmpi::sent(n, type, comm);
  return PMPI_Ssend(data, n, type, to, tag, comm);
}
int MPI_Isend(const void* data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request) {
  regather::pmpi::sent(n, type, comm);
  return PMPI_Isend(data, n, type, to, tag, comm, request);
}
int MPI_Issend(const void* data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request) {
  regather::pmpi::sent(n, type, comm);
  return PMPI_Issend(data, n, type, to, tag, comm, request);
}
int MPI_Recv(void* data, int n, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Status* status) {
  regather::pmpi::received(n, type, comm);
  return PMPI_Recv(data, n, type, from, tag, comm, status);
}
int MPI_Irecv(void* data, int n, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request* request) {
  regather::pmpi::received(n, type, comm);
  return PMPI_Irecv(data, n, type, from, tag, comm, request);
}

// MPI's own collectives: none belongs into a step.
int MPI_Allgather(const void* from, int n, MPI_Datatype t, void* to, int m, MPI_Datatype u, MPI_Comm comm) {
  ++regather::pmpi::count().library_collectives;
  return PMPI_Allgather(from, n, t, to, m, u, comm);
}
int MPI_Iallgather(const void* from, int n, MPI_Datatype t, void* to, int m, MPI_Datatype u, MPI_Comm comm,
                   MPI_Request* request) {
  ++regather::pmpi::count().library_collectives;
  return PMPI_Iallgather(from, n, t, to, m, u, comm, request);
}
int MPI_Alltoall(const void* from, int n, MPI_Datatype t, void* to, int m, MPI_Datatype u, MPI_Comm comm) {
  ++regather::pmpi::count().library_collectives;
  return PMPI_Alltoall(from, n, t, to, m, u, comm);
}
int MPI_Ialltoall(const void* from, int n, MPI_Datatype t, void* to, int m, MPI_Datatype u, MPI_Comm comm,
                  MPI_Request* request) {
  ++regather::pmpi::count().library_collectives;
  return PMPI_Ialltoall(from, n, t, to, m, u, comm, request);
}
int MPI_Allreduce(const void* from, void* to, int n, MPI_Datatype t, MPI_Op op, MPI_Comm comm) {
  ++regather::pmpi::count().library_collectives;
  return PMPI_Allreduce(from, to, n, t, op, comm);
}
int MPI_Iallreduce(const void* from, void* to, int n, MPI_Datatype t, MPI_Op op, MPI_Comm comm, MPI_Request* request) {
  ++regather::pmpi::count().library_collectives;
  return PMPI_Iallreduce(from, to, n, t, op, comm, request);
}
int MPI_Reduce_scatter_block(const void* from, void* to, int n, MPI_Datatype t, MPI_Op op, MPI_Comm comm) {
  ++regather::pmpi::count().library_collectives;
  return PMPI_Reduce_scatter_block(from, to, n, t, op, comm);
}
int MPI_Ireduce_scatter_block(const void* from, void* to, int n, MPI_Datatype t, MPI_Op op, MPI_Comm comm,
                              MPI_Request* request) {
  ++regather::pmpi::count().library_collectives;
  return PMPI_Ireduce_scatter_block(from, to, n, t, op, comm, request);
}
int MPI_Reduce_scatter(const void* from, void* to, const int n[], MPI_Datatype t, MPI_Op op, MPI_Comm comm) {
  ++regather::pmpi::count().library_collectives;
  return PMPI_Reduce_scatter(from, to, n, t, op, comm);
}
int MPI_Ireduce_scatter(const void* from, void* to, const int n[], MPI_Datatype t, MPI_Op op, MPI_Comm comm,
                        MPI_Request* request) {
  ++regather::pmpi::count().library_collectives;
  return PMPI_Ireduce_scatter(from, to, n, t, op, comm, request);
}
int MPI_Barrier(MPI_Comm comm) {
  ++regather::pmpi::count().library_collectives;
  return PMPI_Barrier(comm);
}
int MPI_Ibarrier(MPI_Comm comm, MPI_Request* request) {
  ++regather::pmpi::count().library_collectives;
  return PMPI_Ibarrier(comm, request);
}
int MPI_Bcast(void* data, int n, MPI_Datatype t, int root, MPI_Comm comm) {
  ++regather::pmpi::count().library_collectives;
  return PMPI_Bcast(data, n, t, root, comm);
}
int MPI_Ibcast(void* data, int n, MPI_Datatype t, int root, MPI_Comm comm, MPI_Request* request) {
  ++regather::pmpi::count().library_collectives;
  return PMPI_Ibcast(data, n, t, root, comm, request);
}

}  // extern "C"
