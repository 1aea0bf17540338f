#include "launcher/trace_file.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "launcher/profile_report.h"
#include "tensor/error.h"

namespace regather {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kCompute = 0, kCopies = 1, kCommunication = 2;  // and on, as many as fly at once

// Microseconds, exact: what ends with another event does so in the file.
std::string microseconds(Recorder::Time time) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
  const auto size = ns < 0 ? -ns : ns;
  return fmt::format("{}{}.{:03}", ns < 0 ? "-" : "", size / 1000, size % 1000);
}

class Events {
 public:
  Events(int rank, Recorder::Time zero) : rank_(rank), zero_(zero) {}

  void event(int row, std::string_view name, std::string_view category, Recorder::Time begin, Recorder::Time length,
             const Json& arguments) {
    separate();
    text_ +=
        fmt::format(R"({{"ph":"X","pid":{},"tid":{},"ts":{},"dur":{},"cat":"{}","name":{},"args":{}}})", rank_, row,
                    microseconds(begin - zero_), microseconds(length), category, Json(name).dump(), arguments.dump());
  }
  void label(const char* what, int row, const Json& arguments) {
    separate();
    text_ += fmt::format(R"({{"ph":"M","pid":{},"tid":{},"name":"{}","args":{}}})", rank_, row, what, arguments.dump());
  }
  void row(int row, const std::string& name, int place) {
    label("thread_name", row, {{"name", name}});
    label("thread_sort_index", row, {{"sort_index", place}});
  }
  std::string text() && { return std::move(text_); }

 private:
  void separate() {
    if (!text_.empty()) text_ += ",\n";
  }
  int rank_;
  Recorder::Time zero_;
  std::string text_;
};

void add_interval(Events& events, const Recorder::Interval& i) {
  const bool scope = i.activity == Recorder::Activity::Scope;
  const bool waits = i.activity == Recorder::Activity::Wait;
  const std::string name = scope && !i.detail.empty() ? i.name + " " + i.detail : waits ? "wait: " + i.name : i.name;
  Json arguments = Json::object();
  if (!scope && !i.detail.empty()) arguments["of"] = i.detail;
  if (i.work.flops > 0) arguments["flops"] = i.work.flops;
  if (i.work.bytes > 0) arguments["bytes"] = i.work.bytes;
  const int row = i.activity == Recorder::Activity::Copy ? kCopies : kCompute;
  events.event(row, name, name_of(i.activity), i.begin, i.length, arguments);
}

}  // namespace

std::string trace_events(int rank, std::span<const Recorder::Recording> recordings, Recorder::Time zero) {
  Events events(rank, zero);
  events.label("process_name", 0, {{"name", fmt::format("rank {}", rank)}});
  events.label("process_sort_index", 0, {{"sort_index", rank}});
  std::vector<Recorder::Flight> flights;
  for (const Recorder::Recording& recording : recordings) {
    for (const Recorder::Interval& i : recording.intervals) add_interval(events, i);
    flights.insert(flights.end(), recording.flights.begin(), recording.flights.end());
  }
  std::ranges::stable_sort(flights, {}, &Recorder::Flight::begin);
  std::vector<Recorder::Time> free_from;  // by row of communication
  for (const Recorder::Flight& f : flights) {
    auto row = std::ranges::find_if(free_from, [&](Recorder::Time t) { return t <= f.begin; });
    if (row == free_from.end()) row = free_from.insert(row, f.begin);
    *row = f.begin + f.length;
    Json arguments = {{"bytes", f.bytes}};
    if (!f.detail.empty()) arguments["of"] = f.detail;
    events.event(kCommunication + static_cast<int>(row - free_from.begin()), f.name, "communication", f.begin, f.length,
                 arguments);
  }
  const int rows = static_cast<int>(free_from.size());
  events.row(kCompute, "compute", 0);
  for (int i = 0; i < rows; ++i)
    events.row(kCommunication + i, i == 0 ? "communication" : fmt::format("communication {}", i + 1), 1 + i);
  events.row(kCopies, "copies", 1 + rows);
  return std::move(events).text();
}

std::string trace_file(std::span<const std::string> of_ranks) {
  return fmt::format("{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{}\n]}}\n", fmt::join(of_ranks, ",\n"));
}

}  // namespace regather
