// The command line: which command, its options, and how an error becomes a line on stderr and an exit code. Under
// mpirun or srun every rank runs it; what all ranks find wrong, rank 0 says once, and all of them leave with the same
// code. It does not train, and knows no communicator: where this process runs it takes from the launcher's environment.
#pragma once
#include <functional>
#include <string>

#include "launcher/ranks.h"

namespace regather {

// main() of the program.
int regather_main(int argc, char** argv);

// Which rank of how many this process was started as; 0 of 1 without a launcher. variable: an environment variable's
// value, or null.
struct LaunchPlace {
  int rank = 0, ranks = 1;
};
LaunchPlace launch_place(const std::function<const char*(const char*)>& variable);

// The lines to print for an error on this rank; empty if another rank prints them.
std::string error_lines(const Error& error, ErrorOrigin origin, const LaunchPlace& place);

}  // namespace regather
