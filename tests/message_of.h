// What a call throws, as text.
#pragma once
#include <exception>
#include <string>
#include <string_view>

namespace regather {

template <class F>
std::string message_of(F f) {
  try {
    f();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "nothing thrown";
}
inline bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

}  // namespace regather
