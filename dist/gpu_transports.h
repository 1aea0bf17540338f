// Transports that move the memory of GPUs; their messages and scalars go over another transport. Both are made before
// the device is known and move nothing before use_memory_of(), which all ranks call together; it may be called again
// with another device. Present in builds with CUDA, and in the tests on its emulator.
#pragma once
#include <memory>

#include "dist/transport.h"

namespace regather {

// By NCCL: a GPU for each rank. Sums are added in NCCL's order, which is the same in every run on the same GPUs.
std::unique_ptr<Transport> make_nccl_transport(std::unique_ptr<Transport> messages, int rank, int size);

// Through the hosts' memory, in pieces of chunk_bytes of each rank, and the transport below, whose sums these are, bit
// for bit: ranks may share GPUs.
std::unique_ptr<Transport> make_staged_transport(std::unique_ptr<Transport> below, int rank, int size,
                                                 std::int64_t chunk_bytes);

}  // namespace regather
