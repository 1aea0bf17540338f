// Built in place of mpi_comm.cpp where there is no MPI.
#include "dist/communicator.h"

namespace regather {

std::unique_ptr<Communicator> make_mpi_communicator(const CommunicatorOptions&) {
  throw UsageError("communication.backend: mpi is not available: this build of regather was configured without MPI");
}

}  // namespace regather
