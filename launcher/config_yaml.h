// YAML as a tree of places: what was written, where, and whether it was quoted. Only what a configuration needs:
// scalars, lists, maps; anchors, aliases, tags and several documents are refused. Duplicate keys are kept, for the
// reader to refuse. It does not know any key.
#pragma once
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensor/error.h"

namespace regather {

struct YamlNode {
  enum class Kind { Null, Scalar, List, Map } kind = Kind::Null;
  std::string place;   // "file:line:column", or "--set a.b=v"
  std::string text{};  // of a scalar
  bool quoted = false;
  std::vector<YamlNode> items{};                         // of a list
  std::vector<std::pair<YamlNode, YamlNode>> entries{};  // of a map: key, value
};

// name: the file, for places. An empty document is a Null. Throws UsageError naming the place.
YamlNode parse_yaml(std::string_view text, std::string_view name);
// The same for a value on the command line; every place is `place`.
YamlNode parse_yaml_value(std::string_view text, std::string_view place);

}  // namespace regather
