// Which of how many ranks this process is, by the environment that mpirun or srun gives it. It starts nothing and knows
// no communicator.
#pragma once
#include <functional>
#include <optional>

namespace regather {

struct LaunchPlace {  // a rank of how many
  int rank = 0, ranks = 1;
};
LaunchPlace launch_place();  // 0 of 1 without a launcher
// The same in another environment. variable: an environment variable's value, or null.
LaunchPlace launch_place(const std::function<const char*(const char*)>& variable);

// A number in digits, up to 2^24; nothing if it is not.
std::optional<int> whole_number(const char* text);

}  // namespace regather
