// How a value of each type is spelled: read from YAML, written back, and what is allowed in words. Reading checks the
// type, the range and availability, and collects what is wrong instead of throwing. Invariant: what write_key() gives,
// read_key() takes back to the same bits. It does not know which keys exist.
#pragma once
#include "launcher/config_key.h"
#include "launcher/config_yaml.h"

namespace regather {

class ConfigErrors {
 public:
  // place: "file:line:column" or "--set ..."
  void add(std::string_view place, std::string_view path, std::string_view text) {
    lines_.push_back(fmt::format("{}: {}: {}", place, path, text));
  }
  void add(std::string line) { lines_.push_back(std::move(line)); }
  bool empty() const { return lines_.empty(); }
  void throw_if_any() const {
    if (!lines_.empty()) throw UsageError(fmt::format("{}", fmt::join(lines_, "\n")));
  }

 private:
  std::vector<std::string> lines_;
};

// False, and one or more errors, if the value was not taken.
bool read_key(const YamlNode& node, Key& key, ConfigErrors& errors);
std::string write_key(const Key& key);            // "3e-05", "512MiB", "[0, 2]", "\"a b\""
std::string type_of(const Key& key);              // "an integer"
std::string allowed(const Key& key);              // "an integer >= 1"; "full, gradients, optimizer, none"
std::string unavailable_options(const Key& key);  // of a choice: "bf16"; empty: all are available

// A size as keys have it ("4096", "1.5GiB"); none: it is not one.
std::optional<std::int64_t> read_size(std::string_view text);

// The nearest of the names, or empty if none is near. Hyphens and capitals do not count.
std::string nearest(std::string_view name, const std::vector<std::string>& names);
// What a person who wrote this unknown path may have meant; empty, or "; did you mean a.b?".
std::string suggestion(std::string_view path, const Keys& keys);

}  // namespace regather
