// Built in place of nccl_comm.cpp and staged_comm.cpp where the program is built without CUDA.
#include "dist/communicator.h"

namespace regather {
namespace {

[[noreturn]] void refuse(std::string_view backend) {
  throw UsageError(
      fmt::format("communication.backend: value '{}' moves the memory of GPUs, and this program was built "
                  "without CUDA; the CMake preset cuda builds one with it",
                  backend));
}

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(const CommunicatorOptions&) { refuse("nccl"); }
std::unique_ptr<Communicator> make_staged_communicator(const CommunicatorOptions&) { refuse("staged"); }

}  // namespace regather
