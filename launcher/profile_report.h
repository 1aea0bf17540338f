// A profile as texts: the tables that a person reads, profile.json, and what ranks send to rank 0. It measures nothing.
#pragma once
#include <string>
#include <string_view>

#include "launcher/profile.h"

namespace regather {

std::string_view name_of(Recorder::Activity activity);  // "forward", ...

// "45.2 GFLOP/s (matrix product), 9.8 GB/s (memory) a rank"
std::string describe_limits(const MachineLimits& limits);
// Means over the ranks: operations with the share of their limit, then collectives.
std::string profile_tables(const Profile& profile);
std::string to_json(const Profile& profile);

std::string to_json(const RankProfile& profile);
RankProfile rank_profile_from_json(const std::string& text);

}  // namespace regather
