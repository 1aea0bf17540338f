// The mpi backend under mpirun. The program itself starts and ends MPI, so that each test can have its own
// communicator.
#include "tests/dist/communicator_conformance.h"
#include "tests/dist/pmpi_count.h"

namespace regather::conformance {
namespace {

// Every conformance test also checks the ledger against what went through MPI.
void run_on_mpi(const SimOptions& options, const std::function<void(Communicator&)>& body) {
  const auto communicator = make_mpi_communicator(options);
  pmpi::reset();
  body(*communicator);
  EXPECT_EQ(pmpi::count().sent_bytes, communicator->ledger().wire_bytes());
  EXPECT_EQ(pmpi::count().received_bytes, communicator->ledger().wire_bytes());
  EXPECT_EQ(pmpi::count().library_collectives, 0);
}

INSTANTIATE_TEST_SUITE_P(Mpi, CommunicatorConformance, ::testing::Values(Backend{"mpi", run_on_mpi}), name_of_backend);

TEST(MpiCommunicator, SplitMessagesCostNoMoreBytes) {
  for (const std::int64_t limit : {std::int64_t{1000}, std::int64_t{1} << 30}) {
    CommunicatorOptions options;
    options.max_message_bytes = limit;
    const auto c = make_mpi_communicator(options);
    pmpi::reset();
    Gathered g(*c, 2501, DType::BF16, 1);
    const GatherBuffer buffer = g.buffer();
    c->all_gather({&buffer, 1}, kLabel).wait();
    EXPECT_EQ(pmpi::count().received_bytes, (c->size() - 1) * 5002);
    EXPECT_EQ(pmpi::count().receives, (c->size() - 1) * (limit == 1000 ? 6 : 1));
  }
}

TEST(MpiCommunicator, ReceiveBuffersAreTwoChunksForEachOtherRank) {
  const auto c = make_mpi_communicator({.chunk_bytes = std::int64_t{1} << 20});
  EXPECT_EQ(c->staging_bytes(), (c->size() - 1) * 2 * (std::int64_t{1} << 20));
}

}  // namespace
}  // namespace regather::conformance

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  const int result = RUN_ALL_TESTS();
  MPI_Finalize();
  return result;
}
