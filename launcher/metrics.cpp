#include "launcher/metrics.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>

namespace regather {
namespace {

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// TensorBoard finds a file by the word tfevents in its name and orders files by the time that follows.
std::string events_name() {
  char host[256] = "host";
  ::gethostname(host, sizeof(host) - 1);
  return fmt::format("{}{}.{}.{}{}", RunFolder::kEventsPrefix, static_cast<std::int64_t>(wall_time()), host, ::getpid(),
                     RunFolder::kEventsSuffix);
}

}  // namespace

std::string to_json_line(const StepMetrics& m) {
  return nlohmann::ordered_json{{"step", m.step},
                                {"loss", m.loss},
                                {"grad_norm", m.grad_norm},
                                {"lr", m.lr},
                                {"tokens", m.tokens},
                                {"tokens_per_second", m.tokens_per_second()},
                                {"seconds", m.seconds},
                                {"peak_bytes", m.peak_bytes},
                                {"wire_bytes", m.wire_bytes},
                                {"skipped", m.skipped}}
      .dump();
}

std::string to_json_line(const EvalMetrics& m) {
  return nlohmann::ordered_json{{"step", m.step}, {"eval_loss", m.loss}, {"seconds", m.seconds}}.dump();
}

AppendFile::AppendFile(std::filesystem::path file) : path_(std::move(file)), file_(std::fopen(path_.c_str(), "ae")) {
  if (!file_) throw Error(fmt::format("{}: cannot be written: {}", path_.string(), std::strerror(errno)));
}

void AppendFile::append(std::string_view bytes) {
  const bool written = std::fwrite(bytes.data(), 1, bytes.size(), file_.get()) == bytes.size();
  if (!written || std::fflush(file_.get()) != 0) {
    throw Error(fmt::format("{}: cannot be written: {}", path_.string(), std::strerror(errno)));
  }
}

MetricsLog::MetricsLog(const RunFolder& folder)
    : lines_(folder.file(RunFolder::kMetrics)), events_(folder.file(events_name()), wall_time()) {}

void MetricsLog::append(const StepMetrics& m) {
  lines_.append(to_json_line(m) + "\n");
  events_.scalars(wall_time(), m.step,
                  {{"train/loss", m.loss},
                   {"train/lr", m.lr},
                   {"train/grad_norm", m.grad_norm},
                   {"speed/tokens_per_second", m.tokens_per_second()}});
}

void MetricsLog::append(const EvalMetrics& m) {
  lines_.append(to_json_line(m) + "\n");
  events_.scalars(wall_time(), m.step, {{"eval/loss", m.loss}});
}

}  // namespace regather
