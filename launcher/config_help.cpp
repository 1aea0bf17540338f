// What is said of keys to a person: on the terminal and in docs/configuration.md. All of it comes from the
// descriptions.
#include "launcher/config.h"
#include "launcher/config_value.h"

namespace regather {
namespace {

std::string default_of(const Key& key) { return key.required ? "none: it has to be given" : write_key(key); }

std::string describe_key(const Key& key) {
  std::string text = fmt::format("{}\n  {}\n  default: {}\n", key.path, key.doc, default_of(key));
  if (!key.available)
    return text + fmt::format("  allowed: {} (others are not available in this build)\n", write_key(key));
  text += fmt::format("  allowed: {}\n", allowed(key));
  for (const KeyOption& option : key.options)
    if (option.available && !option.doc.empty()) text += fmt::format("    {:<15} {}\n", option.name, option.doc);
  if (const std::string missing = unavailable_options(key); !missing.empty()) {
    text += fmt::format("  not available in this build: {}\n", missing);
  }
  return text;
}

// Meanings, too, but for the list of all keys.
std::string describe_section(const Keys& keys, std::string_view path) {
  const std::string prefix = path.empty() ? "" : fmt::format("{}.", path);
  std::string text;
  for (const Key& key : keys.keys()) {
    if (!key.path.starts_with(prefix)) continue;
    text +=
        fmt::format("{:<43} {}{}\n", key.path, default_of(key), key.available ? "" : "   (only this, in this build)");
    if (!path.empty()) text += fmt::format("    {}\n", key.doc);
  }
  return text;
}

std::string escaped(std::string text) {
  for (std::size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) text.insert(at, "\\");
  return text;
}

std::string allowed_in_docs(const Key& key) {
  if (!key.available) return fmt::format("only `{}` in this build", write_key(key));
  if (!std::holds_alternative<ChoiceTarget>(key.target)) return escaped(allowed(key));
  std::vector<std::string> names;
  for (const KeyOption& option : key.options) {
    if (option.available) names.push_back(fmt::format("`{}`", option.name));
  }
  const std::string missing = unavailable_options(key);
  return fmt::format("{}{}", fmt::join(names, ", "),
                     missing.empty() ? "" : fmt::format("; not in this build: {}", missing));
}

constexpr std::string_view kIntroduction = R"(# Configuration

<!-- Made by `regather help --markdown` from the descriptions in launcher/config.h. -->

A run is described by one YAML file. Every key is below with its default, what is allowed, and what it means; keys that are
left out have their defaults. `regather check CONFIG` prints the effective configuration, and `regather help KEY` says the
same as this page about one key.

Nothing is ignored: an unknown key, a key given twice, a value of the wrong type or out of range, and a contradiction between
keys are refused, all at once, with file, line and column, before any work. A value that this build does not have is refused
by name. `--set a.b=value` replaces one key of the file, once; the value is read as YAML
(`--set train.optimizer.betas=[0.9,0.99]`).

- An integer has no decimal point; numbers may be written `0.0003` or `3e-4`; neither may be quoted.
- Sizes: `4096`, `512MiB`, `1.5GiB`. Durations: `500ms`, `60s`, `5min`.
- Lists: `[0, 2, 4]`, or one item a line.
)";

}  // namespace

std::string help_on(std::string_view path, const ModelRegistry& models) {
  Config config;
  config.model.types = models;
  Keys keys = keys_of(config);
  if (const Key* key = keys.find(path)) return describe_key(*key);
  if (!path.empty() && keys.find_section(path) == nullptr) {
    throw UsageError(fmt::format("{}: unknown key{}", path, suggestion(path, keys)));
  }
  return describe_section(keys, path) +
         "\n`regather help KEY` says more about one key, `regather help SECTION` what the keys of one mean; `regather "
         "--help` is about commands.\n";
}

std::string configuration_markdown() {
  Config config;
  Keys keys = keys_of(config);
  std::string text(kIntroduction);
  std::string_view section = "?";
  for (const Key& key : keys.keys()) {
    const std::string_view of_key =
        std::string_view(key.path).substr(0, key.path.find('.') == std::string::npos ? 0 : key.path.rfind('.'));
    if (of_key != section) {
      section = of_key;
      text += section.empty() ? "\n## Without a section\n" : fmt::format("\n## {}\n", section);
      for (const KeySection& s : keys.sections()) {
        if (s.path == section)
          text += fmt::format("\n{}{}.\n", static_cast<char>(std::toupper(s.doc[0])), s.doc.substr(1));
      }
      text += "\n| key | default | allowed | meaning |\n|---|---|---|---|\n";
    }
    const std::string value = key.required ? "none: it has to be given" : fmt::format("`{}`", write_key(key));
    text += fmt::format("| `{}` | {} | {} | {} |\n", key.path, value, allowed_in_docs(key), escaped(key.doc));
  }
  return text;
}

}  // namespace regather
