// The mpi backend under mpirun. The program itself starts and ends MPI, so that each test can have its own
// communicator.
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

#include "tests/dist/communicator_conformance.h"

namespace regather::conformance {

INSTANTIATE_TEST_SUITE_P(Mpi, CommunicatorConformance,
                         testing::Values(Backend{"mpi",
                                                 [](const SimOptions& options, const auto& body) {
                                                   const auto communicator = make_mpi_communicator(options);
                                                   body(*communicator);
                                                 }}),
                         name_of_backend);

}  // namespace regather::conformance

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  const int result = RUN_ALL_TESTS();
  MPI_Finalize();
  return result;
}
