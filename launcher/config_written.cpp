// A value written back, and what is allowed in words.
#include <algorithm>
#include <cctype>

#include "launcher/config_units.h"
#include "launcher/config_value.h"

namespace regather {
namespace {

constexpr std::array<ValueUnit, 2> kWrittenTimeUnits = {{{"s", 1000}, {"ms", 1}}};

template <std::size_t N>
std::string write_with_unit(std::int64_t value, const std::array<ValueUnit, N>& units) {
  const ValueUnit* best = nullptr;
  for (const ValueUnit& unit : units) {
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

std::string write_names(const std::vector<std::string>& names) {
  std::vector<std::string> items;
  for (const std::string& name : names) items.push_back(text_value(name));
  return fmt::format("[{}]", fmt::join(items, ", "));
}

}  // namespace

std::string write_key(const Key& key) {
  return std::visit(
      Overloaded{
          [](const bool* v) { return std::string(*v ? "true" : "false"); },
          [](const std::int64_t* v) { return fmt::format("{}", *v); }, [](const double* v) { return with_point(*v); },
          [](const float* v) { return with_point(*v); }, [](const std::string* v) { return text_value(*v); },
          [](const ByteTarget& v) { return *v.value == 0 ? "0" : write_with_unit(*v.value, kByteUnits); },
          [](const std::chrono::milliseconds* v) { return write_with_unit(v->count(), kWrittenTimeUnits); },
          [&](const ChoiceTarget& v) {
            return v.get() < key.options.size() ? key.options[v.get()].name : std::string("?");
          },
          [](const std::optional<std::int64_t>* v) { return *v ? fmt::format("{}", **v) : std::string("auto"); },
          [](const std::vector<std::int64_t>* v) { return fmt::format("[{}]", fmt::join(*v, ", ")); },
          [&](const std::vector<std::string>* v) {
            return key.one_or_more && v->size() == 1 ? text_value(v->front()) : write_names(*v);
          },
          [&](const std::vector<LayerNames>* v) {
            if (v->size() == 1 && v->front().layers.empty()) return write_names(v->front().names);
            std::vector<std::string> entries;
            for (const LayerNames& e : *v)
              entries.push_back(fmt::format(
                  "{{{}{}: {}}}", e.layers.empty() ? "" : fmt::format("layers: [{}], ", fmt::join(e.layers, ", ")),
                  last_part(key.path), write_names(e.names)));
            return fmt::format("[{}]", fmt::join(entries, ", "));
          },
          [](const std::array<double, 2>* v) {
            return fmt::format("[{}, {}]", with_point((*v)[0]), with_point((*v)[1]));
          }},
      key.target);
}

std::string type_of(const Key& key) {
  return std::visit<std::string>(
      Overloaded{[](const bool*) { return "true or false"; }, [](const std::int64_t*) { return "an integer"; },
                 [](const double*) { return "a number"; }, [](const float*) { return "a number"; },
                 [](const std::string*) { return "text"; }, [](const ByteTarget&) { return "a size in bytes"; },
                 [](const std::chrono::milliseconds*) { return "a duration"; },
                 [](const ChoiceTarget&) { return "one of the choices"; },
                 [](const std::optional<std::int64_t>*) { return "auto or an integer"; },
                 [](const std::vector<std::int64_t>*) { return "a list of integers"; },
                 [&](const std::vector<std::string>*) {
                   return std::string(key.one_or_more ? "a text or a list of texts" : "a list of texts");
                 },
                 [&](const std::vector<LayerNames>*) {
                   return fmt::format("a list of texts, or of {{layers, {}}} by layer", last_part(key.path));
                 },
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
