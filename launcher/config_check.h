// Rules between keys, and between a configuration and where it runs. Each names the key to change first, both values,
// and what would fit. A rule is skipped when one of its keys was already refused. The rule for one value alone is in
// its description (config.h), not here.
#pragma once
#include <set>

#include "launcher/config.h"
#include "launcher/config_value.h"

namespace regather {

struct CheckContext {
  std::set<std::string> failed;  // paths whose values were refused
  ConfigPlaces places;
};

// Fills in model.vocab, too.
void check_contradictions(Config& config, const CheckContext& context, ConfigErrors& errors);
// Makes data.files absolute; each has to be a file.
void resolve_files(Config& config, const std::filesystem::path& folder, const CheckContext& context,
                   ConfigErrors& errors);

}  // namespace regather
