#include "launcher/report_parts.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace regather {

using Json = nlohmann::ordered_json;

std::string mebibytes(std::int64_t bytes) { return fmt::format("{:.1f}", static_cast<double>(bytes) / (1 << 20)); }

std::string kinds_json(const BytesByTag& bytes) {
  Json json = Json::object();
  for (const Tag tag : kKinds) json[std::string(name_of(tag))] = bytes[index(tag)];
  return json.dump();
}

std::string collectives_json(const Ledger::Entries& entries) {
  Json all = Json::array();
  for (const auto& [key, counts] : entries)
    all.push_back({{"name", name_of(key.collective)},
                   {"pass", name_of(key.pass)},
                   {"unit", key.unit},
                   {"dtype", name_of(key.dtype)},
                   {"count", counts.count},
                   {"bytes", counts.wire_bytes}});
  return all.dump();
}

}  // namespace regather
