// What reading a value (config_value.cpp) and writing it (config_written.cpp) share. It reads and writes nothing.
#pragma once
#include <array>
#include <cstdint>
#include <string_view>

namespace regather {

template <class... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <class... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;

struct ValueUnit {
  std::string_view name;
  std::int64_t factor;
};
inline constexpr std::array<ValueUnit, 5> kByteUnits = {
    {{"TiB", std::int64_t{1} << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}}};
inline constexpr std::array<ValueUnit, 4> kTimeUnits = {{{"h", 3600000}, {"min", 60000}, {"ms", 1}, {"s", 1000}}};

inline std::string_view last_part(std::string_view path) { return path.substr(path.rfind('.') + 1); }

}  // namespace regather
