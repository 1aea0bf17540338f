#include "launcher/config_value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "launcher/config_units.h"

namespace regather {
namespace {

// What a text says as a number. Out of range: it is a number, and no T can hold it.
template <class T>
struct Parsed {
  std::optional<T> value{};
  bool out_of_range = false;
};

template <class T>
Parsed<T> whole_number(std::string_view text) {
  if (text.starts_with('+')) text.remove_prefix(1);
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (end != text.data() + text.size() || error == std::errc::invalid_argument) return {};
  if (error == std::errc::result_out_of_range) return {.out_of_range = true};
  if constexpr (std::is_floating_point_v<T>) {
    if (!std::isfinite(value)) return {};
  }
  return {.value = value};
}

// "1.5GiB": a number and a unit that give a whole number of the smallest unit; 0 needs no unit.
template <std::size_t N>
Parsed<std::int64_t> with_unit(std::string_view text, const std::array<ValueUnit, N>& units, bool unit_required) {
  for (const ValueUnit& unit : units) {
    if (!text.ends_with(unit.name)) continue;
    std::string_view digits = text.substr(0, text.size() - unit.name.size());
    while (digits.ends_with(' ')) digits.remove_suffix(1);
    const Parsed<double> number = whole_number<double>(digits);
    if (!number.value) return {.out_of_range = number.out_of_range};
    const double value = *number.value * static_cast<double>(unit.factor);
    if (std::abs(value) > 9.0e18) return {.out_of_range = true};
    if (value != std::floor(value)) return {};
    return {.value = static_cast<std::int64_t>(value)};
  }
  return unit_required ? Parsed<std::int64_t>{} : whole_number<std::int64_t>(text);
}

bool inside(double value, const KeyRange& range) {
  if (range.min && (range.min_excluded ? !(value > *range.min) : !(value >= *range.min))) return false;
  if (range.max && (range.max_excluded ? !(value < *range.max) : !(value <= *range.max))) return false;
  return true;
}

// A value as a person wrote it, for messages.
std::string shown(const YamlNode& node) {
  std::vector<std::string> items;
  switch (node.kind) {
    case YamlNode::Kind::Null: return "null";
    case YamlNode::Kind::Map: return "a section";
    case YamlNode::Kind::Scalar: return node.quoted ? fmt::format("\"{}\"", node.text) : fmt::format("'{}'", node.text);
    case YamlNode::Kind::List: break;
  }
  for (const YamlNode& item : node.items)
    items.push_back(item.kind == YamlNode::Kind::Scalar && !item.quoted ? item.text : shown(item));
  return fmt::format("[{}]", fmt::join(items, ", "));
}

std::string item_type_of(const Key& key) {
  if (std::holds_alternative<std::vector<std::int64_t>*>(key.target)) return "an integer";
  return std::holds_alternative<std::array<double, 2>*>(key.target) ? "a number" : "text";
}

// Reads scalars of one key; each function returns nothing after it has reported.
class Reader {
 public:
  Reader(const Key& key, ConfigErrors& errors) : key_(key), errors_(errors) {}

  std::optional<std::int64_t> integer(const YamlNode& node) {
    return in_range(node, plain(node) ? whole_number<std::int64_t>(node.text) : Parsed<std::int64_t>{});
  }
  std::optional<double> number(const YamlNode& node) {
    return in_range(node, plain(node) ? whole_number<double>(node.text) : Parsed<double>{});
  }
  // As a float: what overflows or vanishes in one is out of range.
  std::optional<float> single(const YamlNode& node) {
    const std::optional<double> value = number(node);
    if (!value) return std::nullopt;
    const auto rounded = static_cast<float>(*value);
    if (std::isfinite(rounded) && inside(static_cast<double>(rounded), key_.range)) return rounded;
    report(node, "is out of range");
    return std::nullopt;
  }
  std::optional<std::int64_t> bytes(const YamlNode& node) {
    return in_range(node, plain(node) ? with_unit(node.text, kByteUnits, false) : Parsed<std::int64_t>{});
  }
  std::optional<std::int64_t> milliseconds(const YamlNode& node) {
    return in_range(node, plain(node) ? with_unit(node.text, kTimeUnits, true) : Parsed<std::int64_t>{});
  }
  std::optional<bool> flag(const YamlNode& node) {
    if (plain(node) && (node.text == "true" || node.text == "false")) return node.text == "true";
    wrong_type(node);
    return std::nullopt;
  }
  std::optional<std::string> text(const YamlNode& node) {
    if (node.kind == YamlNode::Kind::Scalar && !(node.text.empty())) return node.text;
    wrong_type(node);
    return std::nullopt;
  }
  std::optional<std::size_t> option(const YamlNode& node) {
    if (node.kind != YamlNode::Kind::Scalar) return wrong_type(node), std::nullopt;
    std::vector<std::string> names;
    for (std::size_t i = 0; i < key_.options.size(); ++i) {
      if (key_.options[i].available) names.push_back(key_.options[i].name);
      if (key_.options[i].name != node.text) continue;
      if (key_.options[i].available) return i;
      report(node, "is not available in this build");
      return std::nullopt;
    }
    const std::string near = names.size() > 1 ? nearest(node.text, names) : "", missing = unavailable_options(key_);
    report(node, "is not known",
           (near.empty() ? "" : fmt::format("; did you mean {}?", near)) +
               (missing.empty() ? "" : fmt::format("; not in this build: {}", missing)));
    return std::nullopt;
  }
  void report(const YamlNode& node, std::string_view what, std::string_view hint = "") {
    errors_.add(node.place, key_.path,
                fmt::format("value {} {}; allowed: {}{}", shown(node), what, allowed(key_), hint));
  }
  void wrong_type(const YamlNode& node) {
    if (node.kind == YamlNode::Kind::Scalar && node.text.empty()) {
      report(node, "is empty");
    } else if (node.kind == YamlNode::Kind::Scalar && node.quoted) {
      report(node, fmt::format("is text (it is quoted), not {}", expected()));
    } else {
      report(node, fmt::format("is not {}", expected()));
    }
  }
  void begin_items() { in_list_ = true; }  // what follows are items of the key's list

 private:
  std::string expected() const { return in_list_ ? item_type_of(key_) : type_of(key_); }
  static bool plain(const YamlNode& node) { return node.kind == YamlNode::Kind::Scalar && !node.quoted; }
  template <class T>
  std::optional<T> in_range(const YamlNode& node, const Parsed<T>& parsed) {
    if (parsed.value && inside(static_cast<double>(*parsed.value), key_.range)) return parsed.value;
    if (parsed.value) {
      report(node, "is out of range");
    } else if (!parsed.out_of_range) {
      wrong_type(node);
    } else if (std::is_integral_v<T> && !node.text.starts_with('-')) {
      report(node, fmt::format("is out of range (the largest integer is {})", std::numeric_limits<T>::max()));
    } else {
      report(node, "is out of range");
    }
    return std::nullopt;
  }

  const Key& key_;
  ConfigErrors& errors_;
  bool in_list_ = false;
};

template <class To, class From>
bool store(To& to, const std::optional<From>& value) {
  if (value) to = static_cast<To>(*value);
  return value.has_value();
}

template <class T, class ReadItem>
bool read_list(const YamlNode& node, std::vector<T>& to, Reader& reader, ReadItem read_item) {
  if (node.kind != YamlNode::Kind::List) return reader.wrong_type(node), false;
  reader.begin_items();
  std::vector<T> values;
  for (const YamlNode& item : node.items) {
    if (const auto value = read_item(item)) values.push_back(*value);
  }
  if (values.size() != node.items.size()) return false;
  to = std::move(values);
  return true;
}

// {layers: [..], keep: [..]} of the key `keep`.
std::optional<LayerNames> read_entry(const YamlNode& node, const Key& key, Reader& reader) {
  if (node.kind != YamlNode::Kind::Map) return reader.wrong_type(node), std::nullopt;
  LayerNames entry;
  bool good = true, named = false;
  for (const auto& [name, value] : node.entries) {
    if (name.text == "layers") {
      good &= read_list(value, entry.layers, reader, [&](const YamlNode& item) { return reader.integer(item); });
    } else if (name.text == last_part(key.path)) {
      named = true;
      good &= read_list(value, entry.names, reader, [&](const YamlNode& item) { return reader.text(item); });
    } else {
      reader.report(name, "is not a key of an entry");
      good = false;
    }
  }
  if (!named && good) reader.report(node, fmt::format("has no {}", last_part(key.path)));
  return good && named ? std::optional(std::move(entry)) : std::nullopt;
}

bool read_layers(const YamlNode& node, std::vector<LayerNames>& to, const Key& key, Reader& reader) {
  const bool by_layer = !node.items.empty() && node.items[0].kind == YamlNode::Kind::Map;
  if (by_layer) return read_list(node, to, reader, [&](const YamlNode& item) { return read_entry(item, key, reader); });
  LayerNames all;
  if (!read_list(node, all.names, reader, [&](const YamlNode& item) { return reader.text(item); })) return false;
  to = {std::move(all)};
  return true;
}

bool read_two(const YamlNode& node, std::array<double, 2>& to, Reader& reader) {
  if (node.kind != YamlNode::Kind::List || node.items.size() != 2) return reader.wrong_type(node), false;
  reader.begin_items();
  const auto first = reader.number(node.items[0]), second = reader.number(node.items[1]);
  if (!first || !second) return false;
  to = {*first, *second};
  return true;
}

bool read_value(const YamlNode& node, Key& key, ConfigErrors& errors) {
  Reader reader(key, errors);
  return std::visit(
      Overloaded{[&](bool* to) { return store(*to, reader.flag(node)); },
                 [&](std::int64_t* to) { return store(*to, reader.integer(node)); },
                 [&](double* to) { return store(*to, reader.number(node)); },
                 [&](float* to) { return store(*to, reader.single(node)); },
                 [&](std::string* to) { return store(*to, reader.text(node)); },
                 [&](const ByteTarget& to) { return store(*to.value, reader.bytes(node)); },
                 [&](std::chrono::milliseconds* to) {
                   const auto value = reader.milliseconds(node);
                   if (value) *to = std::chrono::milliseconds(*value);
                   return value.has_value();
                 },
                 [&](const ChoiceTarget& to) {
                   const auto value = reader.option(node);
                   if (value) to.set(*value);
                   return value.has_value();
                 },
                 [&](std::optional<std::int64_t>* to) {
                   if (node.kind == YamlNode::Kind::Scalar && node.text == "auto") return to->reset(), true;
                   const auto value = reader.integer(node);
                   if (value) *to = *value;
                   return value.has_value();
                 },
                 [&](std::vector<std::int64_t>* to) {
                   return read_list(node, *to, reader, [&](const YamlNode& item) { return reader.integer(item); });
                 },
                 [&](std::vector<std::string>* to) {
                   if (key.one_or_more && node.kind == YamlNode::Kind::Scalar) {
                     const auto value = reader.text(node);
                     if (value) *to = {*value};
                     return value.has_value();
                   }
                   return read_list(node, *to, reader, [&](const YamlNode& item) { return reader.text(item); });
                 },
                 [&](std::vector<LayerNames>* to) { return read_layers(node, *to, key, reader); },
                 [&](std::array<double, 2>* to) { return read_two(node, *to, reader); }},
      key.target);
}

}  // namespace

std::optional<std::int64_t> read_size(std::string_view text) { return with_unit(text, kByteUnits, false).value; }

bool read_key(const YamlNode& node, Key& key, ConfigErrors& errors) {
  const std::string before = write_key(key);
  if (!read_value(node, key, errors)) return false;
  if (key.available || write_key(key) == before) return true;
  // A key that is not served yet takes its default and nothing else. The target is left as read: the caller throws.
  const std::string given = node.kind == YamlNode::Kind::Scalar ? shown(node) : write_key(key);
  errors.add(node.place, key.path, fmt::format("value {} is not available in this build; allowed: {}", given, before));
  return false;
}

}  // namespace regather
