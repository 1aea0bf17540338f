#include "launcher/cost_model.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "launcher/machine.h"
#include "launcher/summary.h"
#include "tensor/error.h"
#include "tensor/hash.h"
#include "tensor/ops/kernels.h"

namespace regather {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kFormat = 1;  // of the file

double seconds_of(Recorder::Time time) { return std::chrono::duration<double>(time).count(); }

// How far apart two amounts of work are; 0: the same.
double distance(const Work& a, const Work& b) {
  const auto apart = [](double x, double y) { return std::abs(std::log((x + 1) / (y + 1))); };
  return apart(a.flops, b.flops) + apart(a.bytes, b.bytes);
}

}  // namespace

bool is_operation(const Recorder::Interval& i) {
  using enum Recorder::Activity;
  return i.activity == Forward || i.activity == Recompute || i.activity == Backward || i.activity == Update ||
         i.activity == Copy;
}

// An operation costs the same whether it runs for the first time or again.
std::string CostModel::key(const Recorder::Interval& i) {
  return (i.activity == Recorder::Activity::Backward ? "backward " : "") + i.name;
}

void CostModel::learn(const std::vector<Step>& steps) {
  struct Sum {
    Work work;
    double seconds = 0;
    int count = 0;
  };
  struct Times {
    Work work;
    std::vector<double> of_step;
  };
  std::map<std::string, std::map<std::pair<double, double>, Times>> times;
  std::vector<double> wire, overhead;
  for (const Step& step : steps) {
    std::map<std::string, std::map<std::pair<double, double>, Sum>> sums;
    double communicated = 0, rest = 0;
    std::size_t operations = 0;
    for (const Recorder::Interval& i : step.intervals) {
      using enum Recorder::Activity;
      const double own = seconds_of(i.own);
      if (i.activity == Communicate || i.activity == Wait) {
        communicated += own;
      } else if (!is_operation(i)) {
        rest += own;
      } else {
        Sum& sum = sums[key(i)][{i.work.flops, i.work.bytes}];
        sum.work = i.work;
        sum.seconds += own;
        ++sum.count;
        ++operations;
      }
    }
    for (const auto& [name, by_work] : sums)
      for (const auto& [work, sum] : by_work) {
        Times& t = times[name][work];
        t.work = sum.work;
        t.of_step.push_back(sum.seconds / sum.count);
      }
    wire.push_back(step.wire_bytes > 0 ? communicated / step.wire_bytes : 0);
    overhead.push_back(operations > 0 ? rest / static_cast<double>(operations) : 0);
  }
  for (const auto& [name, by_work] : times)
    for (const auto& [work, t] : by_work) {
      std::vector<Sample>& samples = measured_[name];
      std::erase_if(samples, [&](const Sample& s) { return distance(s.work, t.work) == 0; });
      samples.push_back({t.work, median(t.of_step)});
    }
  seconds_a_wire_byte_ = median(wire);
  overhead_an_operation_ = median(overhead);
}

CostModel CostModel::mean(const std::vector<CostModel>& of_ranks) {
  CostModel all = of_ranks.at(0);
  const auto n = static_cast<double>(of_ranks.size());
  const auto mean_of = [&](const auto& value) {
    double sum = 0;
    for (const CostModel& one : of_ranks) sum += value(one);
    return sum / n;
  };
  all.limits_.flops = mean_of([](const CostModel& m) { return m.limits_.flops; });
  all.limits_.bytes = mean_of([](const CostModel& m) { return m.limits_.bytes; });
  all.seconds_a_wire_byte_ = mean_of([](const CostModel& m) { return m.seconds_a_wire_byte_; });
  all.overhead_an_operation_ = mean_of([](const CostModel& m) { return m.overhead_an_operation_; });
  all.seconds_to_host_ = mean_of([](const CostModel& m) { return m.seconds_to_host_; });
  all.seconds_to_device_ = mean_of([](const CostModel& m) { return m.seconds_to_device_; });
  for (auto& [name, samples] : all.measured_)
    for (std::size_t i = 0; i < samples.size(); ++i)
      samples[i].seconds = mean_of([&](const CostModel& m) {
        const auto found = m.measured_.find(name);
        const bool same = found != m.measured_.end() && i < found->second.size() &&
                          distance(found->second[i].work, samples[i].work) == 0;
        return same ? found->second[i].seconds : samples[i].seconds;
      });
  return all;
}

double CostModel::seconds(const Recorder::Interval& i) const {
  if (!is_operation(i)) return 0;
  const double least = least_seconds(i.work, limits_);
  const auto found = measured_.find(key(i));
  if (found == measured_.end()) return kFromLimits * least;
  const Sample& nearest =
      *std::ranges::min_element(found->second, {}, [&](const Sample& s) { return distance(s.work, i.work); });
  if (distance(nearest.work, i.work) == 0) return nearest.seconds;
  const double least_of_nearest = least_seconds(nearest.work, limits_);
  return least_of_nearest > 0 ? nearest.seconds * least / least_of_nearest : nearest.seconds;
}

double CostModel::copy_seconds(Stream direction, double bytes) const {
  const double measured = direction == Stream::ToHost ? seconds_to_host_ : seconds_to_device_;
  return bytes * (measured > 0 ? measured : kFromLimits * 2 / limits_.bytes);  // read and written
}

void CostModel::learn_copies(Stream direction, const CopyCounts& counts) {
  if (counts.bytes > 0)
    (direction == Stream::ToHost ? seconds_to_host_ : seconds_to_device_) =
        counts.seconds / static_cast<double>(counts.bytes);
}

std::string CostModel::to_json(const CostPlace& place) const {
  Json operations = Json::array();
  for (const auto& [name, samples] : measured_)
    for (const Sample& s : samples)
      operations.push_back({{"name", name}, {"flops", s.work.flops}, {"bytes", s.work.bytes}, {"seconds", s.seconds}});
  const Json json = {{"format", kFormat},
                     {"machine", place.machine},
                     {"threads", place.threads},
                     {"ranks", place.ranks},
                     {"limits", {{"flops", limits_.flops}, {"bytes", limits_.bytes}}},
                     {"seconds_a_wire_byte", seconds_a_wire_byte_},
                     {"overhead_an_operation", overhead_an_operation_},
                     {"seconds_a_copied_byte", {{"to_host", seconds_to_host_}, {"to_device", seconds_to_device_}}},
                     {"operations", operations}};
  return json.dump(1) + "\n";
}

CostModel CostModel::from_json(std::string_view text) {
  try {
    const Json json = Json::parse(text);
    if (json.at("format").get<int>() != kFormat)
      throw Error(fmt::format("format {}, this program reads {}", json.at("format").dump(), kFormat));
    CostModel costs({.flops = json.at("limits").at("flops"), .bytes = json.at("limits").at("bytes")});
    costs.seconds_a_wire_byte_ = json.at("seconds_a_wire_byte");
    costs.overhead_an_operation_ = json.at("overhead_an_operation");
    if (json.contains("seconds_a_copied_byte")) {  // files of before there were copies have none
      costs.seconds_to_host_ = json.at("seconds_a_copied_byte").at("to_host");
      costs.seconds_to_device_ = json.at("seconds_a_copied_byte").at("to_device");
    }
    for (const Json& o : json.at("operations"))
      costs.measured_[o.at("name").get<std::string>()].push_back(
          {{.flops = o.at("flops"), .bytes = o.at("bytes")}, o.at("seconds").get<double>()});
    return costs;
  } catch (const nlohmann::json::exception& e) {
    throw Error(fmt::format("not a file of costs: {}", e.what()));
  }
}

CostPlace cost_place(std::int64_t threads, std::int64_t ranks, DType compute) {
  std::string_view set = "?";
  for (const Isa isa : {Isa::Baseline, Isa::Avx2, Isa::Avx512})
    if (kernels_for(isa) == &kernels()) set = name_of(isa);
  const std::string_view elements = compute == DType::F32 ? "" : ", bf16";
  return {fmt::format("{}, {} CPUs, {}{}", processor_name(), ::sysconf(_SC_NPROCESSORS_ONLN), set, elements), threads,
          ranks};
}

std::filesystem::path cost_file(const CostPlace& place) {
  std::filesystem::path folder;
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache == '/')
    folder = cache;
  else if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0')
    folder = std::filesystem::path(home) / ".cache";
  if (folder.empty()) return {};
  const std::string name = fmt::format("{}, {} threads, {} ranks", place.machine, place.threads, place.ranks);
  return folder / "regather" / fmt::format("costs-{:016x}.json", hash_of(name.data(), name.size()));
}

std::optional<CostModel> load_costs(const CostPlace& place) {
  const std::filesystem::path file = cost_file(place);
  std::ifstream stream(file, std::ios::binary);
  if (file.empty() || !stream) return std::nullopt;
  std::ostringstream text;
  text << stream.rdbuf();
  return with_context([&] { return file.string(); }, [&] { return CostModel::from_json(text.str()); });
}

void save_costs(const CostPlace& place, const CostModel& costs) {
  const std::filesystem::path file = cost_file(place);
  if (file.empty()) throw Error("costs cannot be kept: neither XDG_CACHE_HOME nor HOME is set");
  std::error_code error;
  std::filesystem::create_directories(file.parent_path(), error);
  if (error) throw Error(fmt::format("{}: cannot be made: {}", file.parent_path().string(), error.message()));
  write_file(file, costs.to_json(place));
}

}  // namespace regather
