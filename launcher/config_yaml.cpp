#include "launcher/config_yaml.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <optional>
#include <sstream>

namespace regather {
namespace {

// Builds the tree from the parser's events: those know the place of every key, and which scalars were quoted.
class TreeBuilder final : public YAML::EventHandler {
 public:
  TreeBuilder(std::string_view name, bool one_place) : name_(name), one_place_(one_place) {}
  YamlNode take() { return std::move(root_); }
  std::string place(const YAML::Mark& mark) const {
    return one_place_ || mark.is_null() ? name_ : fmt::format("{}:{}:{}", name_, mark.line + 1, mark.column + 1);
  }

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    add(node(mark, YamlNode::Kind::Null, "", anchor));
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    throw UsageError(fmt::format("{}: an alias (*name) is not allowed here: write the value out", place(mark)));
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    YamlNode scalar = node(mark, YamlNode::Kind::Scalar, tag, anchor);
    scalar.text = value;
    scalar.quoted = tag == "!";
    // The parser reports ~ and null as nulls only where it resolves tags itself; as a plain scalar they mean the same.
    if (!scalar.quoted && (value.empty() || value == "~" || value == "null" || value == "Null" || value == "NULL")) {
      scalar.kind = YamlNode::Kind::Null;
    }
    add(std::move(scalar));
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open_.push_back(node(mark, YamlNode::Kind::List, tag, anchor));
    keys_.emplace_back();
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open_.push_back(node(mark, YamlNode::Kind::Map, tag, anchor));
    keys_.emplace_back();
  }
  void OnMapEnd() override { close(); }

 private:
  YamlNode node(const YAML::Mark& mark, YamlNode::Kind kind, const std::string& tag, YAML::anchor_t anchor) const {
    const std::string where = place(mark);
    if (anchor != 0) throw UsageError(fmt::format("{}: an anchor (&name) is not allowed here", where));
    if (!tag.empty() && tag != "?" && tag != "!")
      throw UsageError(fmt::format("{}: a tag ({}) is not allowed here", where, tag));
    return {.kind = kind, .place = where};
  }
  void close() {
    YamlNode done = std::move(open_.back());
    open_.pop_back();
    keys_.pop_back();
    add(std::move(done));
  }
  void add(YamlNode done) {
    if (open_.empty()) {
      root_ = std::move(done);
    } else if (open_.back().kind == YamlNode::Kind::List) {
      open_.back().items.push_back(std::move(done));
    } else if (std::optional<YamlNode>& key = keys_.back(); !key) {
      key = std::move(done);
    } else {
      open_.back().entries.emplace_back(std::move(*key), std::move(done));
      key.reset();
    }
  }

  std::string name_;
  bool one_place_;
  YamlNode root_;
  std::vector<YamlNode> open_;                 // lists and maps that have begun
  std::vector<std::optional<YamlNode>> keys_;  // of each: the key that waits for its value
};

// The parser takes a tab in the indentation for part of a value in some places, and its message elsewhere is obscure.
void refuse_tabs(std::string_view text, std::string_view name) {
  std::size_t line = 1, begin = 0;
  while (begin < text.size()) {
    const std::size_t first = text.find_first_not_of(" \n", begin);
    for (std::size_t i = begin; i < std::min(first, text.size()); ++i) {
      if (text[i] == '\n') {
        ++line;
        begin = i + 1;
      }
    }
    if (first == std::string_view::npos) return;
    if (text[first] == '\t') {
      throw UsageError(
          fmt::format("{}:{}:{}: a tab in the indentation; allowed: spaces", name, line, first - begin + 1));
    }
    const std::size_t end = text.find('\n', first);
    if (end == std::string_view::npos) return;
    begin = end + 1;
    ++line;
  }
}

YamlNode parse(std::string_view text, std::string_view name, bool one_place) {
  TreeBuilder builder(name, one_place);
  std::istringstream stream{std::string(text)};
  try {
    YAML::Parser parser(stream);
    if (!parser.HandleNextDocument(builder)) return {.place = std::string(name)};
    YamlNode root = builder.take();
    if (TreeBuilder rest(name, one_place); parser.HandleNextDocument(rest)) {
      throw UsageError(fmt::format("{}: a second document (after ---) is not allowed", rest.take().place));
    }
    return root;
  } catch (const YAML::Exception& e) {
    throw UsageError(
        fmt::format("{}: not valid YAML: {}; is the indentation of this line and of the one before it right?",
                    builder.place(e.mark), e.msg));
  }
}

}  // namespace

YamlNode parse_yaml(std::string_view text, std::string_view name) {
  refuse_tabs(text, name);
  return parse(text, name, false);
}

YamlNode parse_yaml_value(std::string_view text, std::string_view place) { return parse(text, place, true); }

}  // namespace regather
