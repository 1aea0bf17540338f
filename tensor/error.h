// The errors of the project: what went wrong, and the exit code a run ends with. Context is added on the way up, so
// that a message reads "rank 3: step 120: block 7 backward: rerun of gelu (mlp.act): ...". Nothing here prints or
// exits.
#pragma once
#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace regather {

enum class ExitCode { Done = 0, Failed = 1, Usage = 2, OutOfMemory = 3, PeerVanished = 4 };

class Error : public std::exception {
 public:
  explicit Error(std::string message, ExitCode code = ExitCode::Failed) : message_(std::move(message)), code_(code) {}
  const char* what() const noexcept override { return message_.c_str(); }
  ExitCode code() const { return code_; }
  // A place that the message begins with already is not said twice (an operation that names itself).
  void add_context(std::string_view where) {
    if (!message_.starts_with(std::string(where) + ": ")) message_ = fmt::format("{}: {}", where, message_);
  }

 private:
  std::string message_;
  ExitCode code_;
};

// A configuration, a command line or an input file that cannot be used.
class UsageError : public Error {
 public:
  explicit UsageError(std::string message) : Error(std::move(message), ExitCode::Usage) {}
};

class OutOfMemory : public Error {
 public:
  explicit OutOfMemory(std::string message) : Error(std::move(message), ExitCode::OutOfMemory) {}
};

// A broken rule of this library, by the caller or by the library itself.
class LogicError : public Error {
 public:
  explicit LogicError(std::string message) : Error(std::move(message)) {}
};

template <class... Args>
void check(bool ok, fmt::format_string<Args...> text, Args&&... args) {
  if (!ok) throw LogicError(fmt::format(text, std::forward<Args>(args)...));
}

// Runs f; an error that leaves it carries `where()`. Foreign exceptions become an Error, so that they carry it too.
template <class Where, class F>
decltype(auto) with_context(Where&& where, F&& f) {
  try {
    return f();
  } catch (Error& e) {
    e.add_context(where());
    throw;
  } catch (const std::exception& e) {
    throw Error(fmt::format("{}: {}", where(), e.what()));
  }
}

}  // namespace regather
