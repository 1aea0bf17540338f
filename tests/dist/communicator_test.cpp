// The backend of one rank, and what is true of any communicator on its own.
#include "tests/dist/communicator_conformance.h"

namespace regather::conformance {

INSTANTIATE_TEST_SUITE_P(Single, CommunicatorConformance,
                         ::testing::Values(Backend{"single",
                                                   [](const SimOptions& options, const auto& body) {
                                                     const auto communicator = make_single_communicator(options);
                                                     body(*communicator);
                                                   }}),
                         name_of_backend);

TEST(Ledger, DifferencesNameTheEntryAndBothSides) {
  const LedgerKey gather{Collective::AllGather, "block", Pass::Backward, DType::F32};
  const LedgerKey reduce{Collective::ReduceScatter, "wte", Pass::Backward, DType::F32};
  Ledger measured;
  measured.add(gather, {.count = 1, .logical_bytes = 80, .wire_bytes = 40, .seconds = 1});
  measured.add(gather, {.count = 1, .logical_bytes = 80, .wire_bytes = 40});
  EXPECT_TRUE(differences({{gather, {2, 160, 80}}}, measured.entries()).empty());
  EXPECT_EQ(differences({{gather, {1, 80, 40}}}, measured.entries()),
            std::vector<std::string>{
                "all_gather of block (backward, fp32): expected 1 x, 80 bytes, 40 on the wire; measured 2 x, "
                "160 bytes, 80 on the wire"});
  EXPECT_EQ(differences({{gather, {2, 160, 80}}, {reduce, {1, 8, 4}}}, measured.entries()),
            std::vector<std::string>{
                "reduce_scatter of wte (backward, fp32): expected 1 x, 8 bytes, 4 on the wire; measured none"});
  EXPECT_EQ(differences({}, measured.entries()),
            std::vector<std::string>{
                "all_gather of block (backward, fp32): expected none; measured 2 x, 160 bytes, 80 on the wire"});
}

TEST(Ledger, TimeOfACollectiveThatEndsAfterAResetDoesNotBringItsEntryBack) {
  Ledger ledger;
  const LedgerKey gather{Collective::AllGather, "block", Pass::Backward, DType::F32};
  ledger.add(gather, {.count = 1});
  ledger.add_seconds(gather, 0.5);
  EXPECT_EQ(ledger.entries().at(gather).seconds, 0.5);
  ledger.reset();
  ledger.add_seconds(gather, 0.5);
  EXPECT_TRUE(ledger.entries().empty());
}

TEST(Communicator, TheLedgerStartsAgainAfterAReset) {
  const auto c = make_single_communicator({});
  c->barrier(kLabel);
  EXPECT_EQ(c->ledger().entries().size(), 1u);
  c->reset_ledger();
  EXPECT_TRUE(c->ledger().entries().empty());
}

TEST(Communicator, RefusesSizesOfZero) {
  EXPECT_THROW(make_single_communicator({.chunk_bytes = 0}), LogicError);
  EXPECT_THROW(make_single_communicator({.max_message_bytes = 0}), LogicError);
}

}  // namespace regather::conformance
