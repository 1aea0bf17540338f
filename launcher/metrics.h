// The numbers of every step, as they happen: metrics.jsonl (a JSON object a line) and a TensorBoard events file. A line
// is in the file when append() returns, so that a run that is killed has lost nothing. One rank writes. It keeps no
// history.
#pragma once
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "launcher/summary.h"

namespace regather {

struct StepMetrics {
  std::int64_t step = 0;  // from 1
  double loss = 0, grad_norm = 0, lr = 0;
  std::int64_t tokens = 0;  // of all ranks
  double seconds = 0;
  std::int64_t peak_bytes = 0, wire_bytes = 0;  // of a rank
  bool skipped = false;
  double tokens_per_second() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }
};

std::string to_json_line(const StepMetrics& metrics);  // without the newline; numbers that are not finite are null
std::string to_json_line(const EvalMetrics& metrics);

// A file that is appended to; throws Error naming it.
class AppendFile {
 public:
  explicit AppendFile(std::filesystem::path file);
  void append(std::string_view bytes);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::filesystem::path path_;
  std::unique_ptr<std::FILE, Close> file_;
};

// TensorBoard's format: records of length, checksums and an Event message (tensorflow/core/util/event.proto), of which
// this writes wall time, step, file version, and scalars.
class EventsFile {
 public:
  EventsFile(std::filesystem::path file, double wall_time);
  void scalars(double wall_time, std::int64_t step, const std::vector<std::pair<std::string, double>>& values);

 private:
  AppendFile file_;
};
std::uint32_t crc32c(std::string_view bytes);

class MetricsLog {
 public:
  explicit MetricsLog(const RunFolder& folder);
  void append(const StepMetrics& metrics);
  void append(const EvalMetrics& metrics);

 private:
  AppendFile lines_;
  EventsFile events_;
};

}  // namespace regather
