// The command line: which command, its options, and how an error becomes a line on stderr and an exit code. Under
// mpirun or srun every rank runs it; what all ranks find wrong, rank 0 says once, and all of them leave with the same
// code. It does not train, and knows no communicator: where this process runs it takes from the launcher's environment.
#pragma once
#include <functional>
#include <string>

#include "launcher/ranks.h"
#include "model/registry.h"

namespace regather {

// What regather::main (regather.h) does, in a known place. tell_others: called with an error that this rank met before
// it had a communicator, once it has been printed. A launcher ends all ranks when one of them fails; so they have to
// end together for the first to be heard.
int run_command_line(int argc, char** argv, const LaunchPlace& place,
                     const std::function<void(const Error&)>& tell_others,
                     const ModelRegistry& models = built_in_models());

// The lines to print for an error on this rank; empty if another rank prints them.
std::string error_lines(const Error& error, ErrorOrigin origin, const LaunchPlace& place);

}  // namespace regather
