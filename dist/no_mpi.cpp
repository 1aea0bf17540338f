// Built in place of mpi_comm.cpp where there is no MPI.
#include "dist/transport.h"

namespace regather {

Joined join_mpi(const CommunicatorOptions&) {
  throw UsageError("communication.backend: mpi is not available: this build of regather was configured without MPI");
}

}  // namespace regather
