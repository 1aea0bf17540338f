#include "launcher/config_key.h"

#include <algorithm>

#include "tensor/error.h"

namespace regather {

Key& Keys::add(std::string_view name, KeyTarget target, std::string_view doc, KeyRange range) {
  keys_.push_back(
      {.path = prefix_ + std::string(name), .doc = std::string(doc), .target = std::move(target), .range = range});
  return keys_.back();
}

Key& Keys::add_choice(std::string_view name, ChoiceTarget choice, std::vector<KeyOption> options,
                      std::string_view doc) {
  Key& key = add(name, std::move(choice), doc);
  key.options = std::move(options);
  return key;
}

Key& Keys::choice(std::string_view name, std::string& value, std::vector<KeyOption> options, std::string_view doc) {
  const auto get = [&value, options] {
    const auto found =
        std::find_if(options.begin(), options.end(), [&](const KeyOption& o) { return o.name == value; });
    return static_cast<std::size_t>(found - options.begin());
  };
  return add_choice(name, {get, [&value, options](std::size_t i) { value = options[i].name; }}, options, doc);
}

Key* Keys::find(std::string_view path) {
  const auto found = std::find_if(keys_.begin(), keys_.end(), [&](const Key& key) { return key.path == path; });
  return found == keys_.end() ? nullptr : &*found;
}

const KeySection* Keys::find_section(std::string_view path) const {
  const auto found =
      std::find_if(sections_.begin(), sections_.end(), [&](const KeySection& section) { return section.path == path; });
  return found == sections_.end() ? nullptr : &*found;
}

}  // namespace regather
