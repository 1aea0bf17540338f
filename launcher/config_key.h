// The vocabulary in which configuration keys are described: one call of Keys a key, next to the field it fills. From
// these descriptions alone come parsing, validation, the effective configuration, `regather help`,
// docs/configuration.md and the nearest known name in messages. Availability is data too: later() on a key, or on one
// of its choices, makes this build accept the default only and say so. A description points into the Config it was made
// from and lives no longer. It does not know YAML, and nothing about rules between keys (config_check.cpp).
#pragma once
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace regather {

struct KeyRange {
  std::optional<double> min{}, max{};
  bool min_excluded = false, max_excluded = false;
};
inline KeyRange at_least(double min) { return {.min = min}; }
inline KeyRange above(double min) { return {.min = min, .min_excluded = true}; }
inline KeyRange between(double min, double max) { return {.min = min, .max = max}; }
inline KeyRange from_below(double min, double max) { return {.min = min, .max = max, .max_excluded = true}; }

struct KeyOption {
  KeyOption(std::string option_name) : name(std::move(option_name)) {}
  KeyOption(const char* option_name) : name(option_name) {}  // implicit: choices are written as {"full", later("x")}
  std::string name;
  std::string doc{};  // empty: the key's own says it
  bool available = true;
};
inline KeyOption later(const char* name) {
  KeyOption option(name);
  option.available = false;
  return option;
}

// An entry of a list that may differ by layer; no layers: those that no other entry lists.
struct LayerNames {
  std::vector<std::int64_t> layers{};
  std::vector<std::string> names{};
  bool operator==(const LayerNames&) const = default;
};

// Where a value goes. Pointers into the Config that is being described.
struct ByteTarget {
  std::int64_t* value;
};
struct ChoiceTarget {
  std::function<std::size_t()> get;
  std::function<void(std::size_t)> set;
};
using KeyTarget =
    std::variant<bool*, std::int64_t*, double*, float*, std::string*, ByteTarget, std::chrono::milliseconds*,
                 ChoiceTarget, std::optional<std::int64_t>*, std::vector<std::int64_t>*, std::vector<std::string>*,
                 std::vector<LayerNames>*, std::array<double, 2>*>;

struct Key {
  std::string path, doc;
  KeyTarget target;
  KeyRange range{};
  std::vector<KeyOption> options{};
  std::vector<std::string> other_names{};  // what other programs call it: for suggestions only
  std::string policy{};                    // the checkpoint policy that reads it; empty: whatever the policy is
  bool available = true, required = false, one_or_more = false;

  Key& also(std::initializer_list<const char*> names) {
    other_names.assign(names.begin(), names.end());
    return *this;
  }
  Key& of_policy(const char* name) {
    policy = name;
    return *this;
  }
  Key& later() {
    available = false;
    return *this;
  }
  Key& or_one() {  // of a list of texts: one of them need not be a list
    one_or_more = true;
    return *this;
  }
  Key& needed() {
    required = true;
    return *this;
  }
};

struct KeySection {
  std::string path, doc;
  std::string short_for{};  // the key that the section's value is for when it is no section
};

class Keys {
 public:
  Key& flag(std::string_view name, bool& value, std::string_view doc) { return add(name, &value, doc); }
  Key& integer(std::string_view name, std::int64_t& value, KeyRange range, std::string_view doc) {
    return add(name, &value, doc, range);
  }
  Key& auto_or_integer(std::string_view name, std::optional<std::int64_t>& value, KeyRange range,
                       std::string_view doc) {
    return add(name, &value, doc, range);
  }
  Key& number(std::string_view name, double& value, KeyRange range, std::string_view doc) {
    return add(name, &value, doc, range);
  }
  Key& number(std::string_view name, float& value, KeyRange range, std::string_view doc) {
    return add(name, &value, doc, range);
  }
  Key& two_numbers(std::string_view name, std::array<double, 2>& value, KeyRange range, std::string_view doc) {
    return add(name, &value, doc, range);
  }
  Key& text(std::string_view name, std::string& value, std::string_view doc) { return add(name, &value, doc); }
  Key& bytes(std::string_view name, std::int64_t& value, std::string_view doc) {
    return add(name, ByteTarget{&value}, doc, at_least(0));
  }
  Key& duration(std::string_view name, std::chrono::milliseconds& value, KeyRange milliseconds, std::string_view doc) {
    return add(name, &value, doc, milliseconds);
  }
  Key& list(std::string_view name, std::vector<std::int64_t>& value, KeyRange range, std::string_view doc) {
    return add(name, &value, doc, range);
  }
  Key& list(std::string_view name, std::vector<std::string>& value, std::string_view doc) {
    return add(name, &value, doc);
  }

  // A list of names for every layer, or of {layers: [..], <key>: [..]}.
  Key& list(std::string_view name, std::vector<LayerNames>& value, std::string_view doc) {
    return add(name, &value, doc);
  }

  // The options in the order of the enumerators, which count from 0.
  template <class E>
  Key& choice(std::string_view name, E& value, std::vector<KeyOption> options, std::string_view doc) {
    return add_choice(
        name,
        {[&value] { return static_cast<std::size_t>(value); }, [&value](std::size_t i) { value = static_cast<E>(i); }},
        std::move(options), doc);
  }
  Key& choice(std::string_view name, std::string& value, std::vector<KeyOption> options, std::string_view doc);

  template <class S>
  void section(std::string_view name, S& fields, std::string_view doc, std::string_view short_for = "") {
    const std::string outer = prefix_;
    sections_.push_back({outer + std::string(name), std::string(doc), std::string(short_for)});
    prefix_ = outer + std::string(name) + ".";
    fields.describe(*this);
    prefix_ = outer;
  }

  std::vector<Key>& keys() { return keys_; }
  const std::vector<Key>& keys() const { return keys_; }
  const std::vector<KeySection>& sections() const { return sections_; }
  Key* find(std::string_view path);
  const KeySection* find_section(std::string_view path) const;

 private:
  Key& add(std::string_view name, KeyTarget target, std::string_view doc, KeyRange range = {});
  Key& add_choice(std::string_view name, ChoiceTarget choice, std::vector<KeyOption> options, std::string_view doc);

  std::string prefix_;
  std::vector<Key> keys_;
  std::vector<KeySection> sections_;
};

}  // namespace regather
