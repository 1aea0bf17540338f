#include "launcher/config_value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

namespace regather {
namespace {

template <class... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <class... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;

struct Unit {
  std::string_view name;
  std::int64_t factor;
};
constexpr std::array<Unit, 5> kByteUnits = {
    {{"TiB", std::int64_t{1} << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}}};
constexpr std::array<Unit, 4> kTimeUnits = {{{"h", 3600000}, {"min", 60000}, {"ms", 1}, {"s", 1000}}};
constexpr std::array<Unit, 2> kWrittenTimeUnits = {{{"s", 1000}, {"ms", 1}}};

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
Parsed<std::int64_t> with_unit(std::string_view text, const std::array<Unit, N>& units, bool unit_required) {
  for (const Unit& unit : units) {
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

template <std::size_t N>
std::string write_with_unit(std::int64_t value, const std::array<Unit, N>& units) {
  const Unit* best = nullptr;
  for (const Unit& unit : units) {
    if (value % unit.factor == 0 && (best == nullptr || unit.factor > best->factor)) best = &unit;
  }
  return fmt::format("{}{}", value / best->factor, best->name);  // the smallest unit divides everything
}

// As `3.0e-05`: with a point, which other YAML readers need to take it for a number.
template <class T>
std::string with_point(T value) {
  std::string text = fmt::format("{}", value);
  if (text.find('.') == std::string::npos) text.insert(std::min(text.find('e'), text.size()), ".0");
  return text;
}

std::string number_text(double value) { return fmt::format("{}", value); }

std::string range_text(const KeyRange& range, std::string_view unit = "") {
  if (range.min && range.max && !range.min_excluded && !range.max_excluded) {
    return fmt::format(" from {}{} to {}{}", number_text(*range.min), unit, number_text(*range.max), unit);
  }
  std::string text;
  if (range.min) text += fmt::format(" {} {}{}", range.min_excluded ? ">" : ">=", number_text(*range.min), unit);
  if (range.max)
    text += fmt::format("{} {} {}{}", range.min ? " and" : "", range.max_excluded ? "<" : "<=", number_text(*range.max),
                        unit);
  return text;
}

bool inside(double value, const KeyRange& range) {
  if (range.min && (range.min_excluded ? !(value > *range.min) : !(value >= *range.min))) return false;
  if (range.max && (range.max_excluded ? !(value < *range.max) : !(value <= *range.max))) return false;
  return true;
}

bool plain_text(const std::string& text) {
  const auto safe = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '.' || c == '/' || c == '-' || c == '+';
  };
  return !text.empty() && text[0] != '-' && text != "null" && text != "Null" && text != "NULL" &&
         std::all_of(text.begin(), text.end(), safe);
}

std::string text_value(const std::string& text) {
  if (plain_text(text)) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      quoted += fmt::format("\\x{:02x}", static_cast<unsigned>(c));
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
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
                   return read_list(node, *to, reader, [&](const YamlNode& item) { return reader.text(item); });
                 },
                 [&](std::array<double, 2>* to) { return read_two(node, *to, reader); }},
      key.target);
}

}  // namespace

bool read_key(const YamlNode& node, Key& key, ConfigErrors& errors) {
  const std::string before = write_key(key);
  if (!read_value(node, key, errors)) return false;
  if (key.available || write_key(key) == before) return true;
  // A key that is not served yet takes its default and nothing else. The target is left as read: the caller throws.
  const std::string given = node.kind == YamlNode::Kind::Scalar ? shown(node) : write_key(key);
  errors.add(node.place, key.path, fmt::format("value {} is not available in this build; allowed: {}", given, before));
  return false;
}

std::string write_key(const Key& key) {
  return std::visit(
      Overloaded{[](const bool* v) { return std::string(*v ? "true" : "false"); },
                 [](const std::int64_t* v) { return fmt::format("{}", *v); },
                 [](const double* v) { return with_point(*v); }, [](const float* v) { return with_point(*v); },
                 [](const std::string* v) { return text_value(*v); },
                 [](const ByteTarget& v) { return *v.value == 0 ? "0" : write_with_unit(*v.value, kByteUnits); },
                 [](const std::chrono::milliseconds* v) { return write_with_unit(v->count(), kWrittenTimeUnits); },
                 [&](const ChoiceTarget& v) {
                   return v.get() < key.options.size() ? key.options[v.get()].name : std::string("?");
                 },
                 [](const std::optional<std::int64_t>* v) { return *v ? fmt::format("{}", **v) : std::string("auto"); },
                 [](const std::vector<std::int64_t>* v) { return fmt::format("[{}]", fmt::join(*v, ", ")); },
                 [](const std::vector<std::string>* v) {
                   std::vector<std::string> items;
                   for (const std::string& item : *v) items.push_back(text_value(item));
                   return fmt::format("[{}]", fmt::join(items, ", "));
                 },
                 [](const std::array<double, 2>* v) {
                   return fmt::format("[{}, {}]", with_point((*v)[0]), with_point((*v)[1]));
                 }},
      key.target);
}

std::string type_of(const Key& key) {
  return std::visit(
      Overloaded{[](const bool*) { return "true or false"; }, [](const std::int64_t*) { return "an integer"; },
                 [](const double*) { return "a number"; }, [](const float*) { return "a number"; },
                 [](const std::string*) { return "text"; }, [](const ByteTarget&) { return "a size in bytes"; },
                 [](const std::chrono::milliseconds*) { return "a duration"; },
                 [](const ChoiceTarget&) { return "one of the choices"; },
                 [](const std::optional<std::int64_t>*) { return "auto or an integer"; },
                 [](const std::vector<std::int64_t>*) { return "a list of integers"; },
                 [](const std::vector<std::string>*) { return "a list of texts"; },
                 [](const std::array<double, 2>*) { return "a list of two numbers"; }},
      key.target);
}

std::string unavailable_options(const Key& key) {
  std::vector<std::string> names;
  for (const KeyOption& option : key.options)
    if (!option.available) names.push_back(option.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

std::string allowed(const Key& key) {
  if (std::holds_alternative<ChoiceTarget>(key.target)) {
    std::vector<std::string> names;
    for (const KeyOption& option : key.options) {
      if (option.available) names.push_back(option.name);
    }
    return fmt::format("{}", fmt::join(names, ", "));
  }
  if (std::holds_alternative<ByteTarget>(key.target))
    return "a size such as 4096, 512MiB or 2GiB (B, KiB, MiB, GiB, TiB)";
  if (std::holds_alternative<std::chrono::milliseconds*>(key.target)) {
    return fmt::format("a duration such as 500ms, 60s or 5min, from {} to {}",
                       write_with_unit(static_cast<std::int64_t>(*key.range.min), kTimeUnits),
                       write_with_unit(static_cast<std::int64_t>(*key.range.max), kTimeUnits));
  }
  const bool many = std::holds_alternative<std::vector<std::int64_t>*>(key.target) ||
                    std::holds_alternative<std::array<double, 2>*>(key.target);
  return type_of(key) + (many && (key.range.min || key.range.max) ? ", each" : "") + range_text(key.range);
}

}  // namespace regather
