#include "launcher/config.h"

#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "dist/backend.h"
#include "launcher/config_check.h"
#include "launcher/config_value.h"

namespace regather {
namespace {

// Puts what a tree says into the keys of one Config, remembering where each came from.
class Assignment {
 public:
  Assignment(Keys& keys, ConfigErrors& errors) : keys_(keys), errors_(errors) {}

  void section(const YamlNode& node, const std::string& path) {
    if (node.kind == YamlNode::Kind::Null) return;  // a section whose keys are all commented out
    if (node.kind != YamlNode::Kind::Map) {
      errors_.add(node.place, path.empty() ? "(top)" : path,
                  "is not a section; allowed: `key: value` lines, indented below it");
      return;
    }
    std::map<std::string, std::string> seen;
    for (const auto& [name, value] : node.entries) {
      const std::string key = (path.empty() ? "" : path + ".") + name.text;
      if (name.kind != YamlNode::Kind::Scalar) {
        errors_.add(name.place + ": a key has to be a name");
      } else if (const auto [first, fresh] = seen.emplace(key, name.place); !fresh) {
        errors_.add(name.place, key, fmt::format("given twice; first at {}", first->second));
      } else {
        entry(name, value, key);
      }
    }
  }
  void entry(const YamlNode& name, const YamlNode& value, const std::string& path) {
    if (Key* key = keys_.find(path)) {
      const std::string& place = in_set_ ? value.place : name.place;
      if (const auto [first, fresh] = given_.emplace(path, place); !fresh)
        return errors_.add(place, path, fmt::format("given twice; first {} {}", in_set_ ? "by" : "at", first->second));
      sources_[path] = value.place;
      if (!read_key(value, *key, errors_)) failed_.insert(path);
    } else if (const KeySection* of = keys_.find_section(path)) {
      const bool one_key = value.kind == YamlNode::Kind::Scalar || value.kind == YamlNode::Kind::List;
      if (one_key && !of->short_for.empty()) return entry(name, value, path + "." + of->short_for);
      section(value, path);
    } else {
      const std::string what =
          path.find('.') == std::string::npos && value.kind == YamlNode::Kind::Map ? "section" : "key";
      errors_.add(name.place, path, fmt::format("unknown {}{}", what, suggestion(path, keys_)));
    }
  }
  // What follows replaces keys of the file, each at most once.
  void begin_sets() {
    in_set_ = true;
    given_.clear();
  }
  void missing(std::string_view file) {
    for (const Key& key : keys_.keys()) {
      if (!key.required || sources_.contains(key.path)) continue;
      errors_.add(file, key.path, fmt::format("is missing; it has no default; allowed: {}", allowed(key)));
      failed_.insert(key.path);
    }
  }
  const std::set<std::string>& failed() const { return failed_; }
  std::map<std::string, std::string> take_sources() { return std::move(sources_); }

 private:
  Keys& keys_;
  ConfigErrors& errors_;
  std::map<std::string, std::string> sources_;  // path -> place of its value
  std::map<std::string, std::string> given_;    // path -> place of the key: by the file, then by --set; however spelled
  bool in_set_ = false;
  std::set<std::string> failed_;
};

void apply_set(const std::string& set, Assignment& to, ConfigErrors& errors) {
  const std::string place = "--set " + set;
  const std::size_t equals = set.find('=');
  if (equals == std::string::npos || equals == 0) {
    errors.add(place + ": has no key and value; allowed: --set section.key=value");
    return;
  }
  const std::string path = set.substr(0, equals);
  try {
    YamlNode value = parse_yaml_value(std::string_view(set).substr(equals + 1), place);
    if (value.place.empty()) value.place = place;
    to.entry({.kind = YamlNode::Kind::Scalar, .place = place, .text = path}, value, path);
  } catch (const UsageError& e) {
    errors.add(e.what());
  }
}

enum class Files { AsWritten, BesideTheConfig };

Config parse(std::string_view text, std::string_view name, std::span<const std::string> sets,
             const ModelRegistry& models, Files files) {
  const YamlNode root = parse_yaml(text, name);
  if (root.kind == YamlNode::Kind::Null) throw UsageError(fmt::format("{}: the configuration is empty", name));
  if (root.kind != YamlNode::Kind::Map) {
    throw UsageError(fmt::format("{}: is not a configuration; allowed: `section:` and `key: value` lines", root.place));
  }
  Config config;
  config.model.types = models;
  Keys keys = keys_of(config);
  ConfigErrors errors;
  Assignment assignment(keys, errors);
  assignment.section(root, "");
  assignment.begin_sets();
  for (const std::string& set : sets) apply_set(set, assignment, errors);
  assignment.missing(name);

  config.places = {.file = std::string(name), .of_key = assignment.take_sources()};
  const CheckContext context{.failed = assignment.failed(), .places = config.places};
  if (files == Files::BesideTheConfig && !context.failed.contains("data.files")) {
    resolve_files(config, std::filesystem::absolute(config.places.file).parent_path(), context, errors);
  }
  check_contradictions(config, context, errors);
  errors.throw_if_any();
  return config;
}

// What a key may name: the rows of a table.
template <class Table>
std::vector<KeyOption> names(const Table& table) {
  std::vector<KeyOption> all;
  for (const auto& row : table) all.emplace_back(std::string(row.name));
  return all;
}

// "a.b.c" at a time: the headings that differ from the line before, then "c: value".
class YamlWriter {
 public:
  void line(const Key& key) {
    std::size_t depth = 0, begin = 0;
    for (std::size_t dot; (dot = key.path.find('.', begin)) != std::string::npos; begin = dot + 1, ++depth) {
      const std::string part = key.path.substr(begin, dot - begin);
      if (depth < open_.size() && open_[depth] == part) continue;
      open_.resize(depth);
      open_.push_back(part);
      text_ += fmt::format("{:{}}{}:\n", "", 2 * depth, part);
    }
    open_.resize(depth);
    text_ += fmt::format("{:{}}{}: {}\n", "", 2 * depth, key.path.substr(begin), write_key(key));
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
  std::vector<std::string> open_;
};

}  // namespace

std::vector<KeyOption> names_of(const ModelRegistry& models) { return names(models); }

std::vector<KeyOption> names_of_policies() {
  std::vector<KeyOption> all = names(policies());
  for (std::size_t i = 0; i < all.size(); ++i) all[i].doc = policies()[i].summary;
  return all;
}

std::vector<KeyOption> names_of_backends() { return names(backends()); }

Keys keys_of(Config& config) {
  Keys keys;
  config.describe(keys);
  return keys;
}

Config load_config(const std::filesystem::path& file, std::span<const std::string> sets, const ModelRegistry& models) {
  std::error_code error;
  if (std::filesystem::is_directory(file, error)) {
    throw UsageError(fmt::format("{}: is a folder; allowed: a YAML file", file.string()));
  }
  std::ifstream stream(file, std::ios::binary);
  std::ostringstream text;
  if (!stream || !(text << stream.rdbuf())) {
    // An empty file inserts nothing, which is a failure of operator<< too.
    const bool empty = stream && std::filesystem::file_size(file, error) == 0 && !error;
    if (empty) throw UsageError(fmt::format("{}: the configuration is empty", file.string()));
    throw UsageError(
        fmt::format("{}: cannot be read: {}", file.string(),
                    std::filesystem::exists(file, error) ? "permission denied, or not a file" : "no such file"));
  }
  return parse(text.str(), file.string(), sets, models, Files::BesideTheConfig);
}

Config parse_config(std::string_view text, std::string_view name, std::span<const std::string> sets,
                    const ModelRegistry& models) {
  return parse(text, name, sets, models, Files::AsWritten);
}

Model make_model(const ModelSection& section) { return make_model(section, section.types); }

CheckpointPlan checkpoint_plan(const Config& config) {
  const CheckpointingConfig& ac = config.activation_checkpointing;
  PolicyOptions options;
  options.policy = ac.policy;
  options.every_n_layers = static_cast<int>(ac.every_n_layers);
  options.segments = static_cast<int>(ac.segments);
  for (const std::int64_t layer : ac.layers) options.layers.push_back(static_cast<int>(layer));
  options.keep.clear();
  for (const LayerNames& entry : ac.keep)
    options.keep.push_back({.layers = {entry.layers.begin(), entry.layers.end()}, .keep = entry.names});
  if (ac.offload.on()) {
    options.offload = {.names = ac.offload.marks,
                       .depth = static_cast<int>(ac.offload.depth),
                       .keep_last = static_cast<int>(ac.offload.keep_last),
                       .fraction = ac.offload.fraction};
  }
  if (ac.policy == "selective" || ac.offload.on()) {
    const Model model = make_model(config.model);
    const Shape tokens{config.train.micro_batch, config.data.sequence};
    options.marks = marks_of(model, tokens);
    if (ac.offload.on()) options.costly = costly_marks_of(model, tokens);
  }
  options.planned = ac.planned;
  options.order = checkpoint_order(config);
  return make_checkpoint_plan(options, static_cast<int>(config.model.layers));
}

std::optional<Order> checkpoint_order(const Config& config) {
  switch (config.activation_checkpointing.order) {
    case CheckpointingConfig::Order::Auto: break;
    case CheckpointingConfig::Order::Lazy: return Order::Lazy;
    case CheckpointingConfig::Order::Ahead: return Order::Ahead;
    case CheckpointingConfig::Order::Eager: return Order::Eager;
  }
  return std::nullopt;
}

bool ranks_are_threads(const Config& config) {
  return find_backend(config.communication.backend).ranks == Backend::Ranks::Threads;
}

void validate(Config& config) {
  ConfigErrors errors;
  check_contradictions(config, {.failed = {}, .places = config.places}, errors);
  errors.throw_if_any();
}

void add_place(const Config& config, Error& error) {
  const std::string_view message = error.what();
  const std::string key(message.substr(0, message.find(": ")));
  Config copy = config;
  if (keys_of(copy).find(key) != nullptr) error.add_context(config.places.of(key));
}

std::string to_yaml(const Config& config) {
  Config copy = config;
  const Keys keys = keys_of(copy);
  YamlWriter writer;
  for (const Key& key : keys.keys()) writer.line(key);
  return writer.take();
}

}  // namespace regather
