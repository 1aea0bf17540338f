#include "launcher/preflight.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "launcher/progress.h"
#include "tensor/ops/kernels.h"

namespace regather {
namespace {

BatchGrid batch_grid(const Config& config, int world) {
  return {.ranks = world, .micro_batch = config.train.micro_batch, .accumulation = config.train.accumulation};
}

DataOptions data_options(const Config& config, const BatchGrid& grid) {
  DataOptions options;
  for (const std::string& file : config.data.files) options.files.emplace_back(file);
  options.sequence = config.data.sequence;
  options.seed = static_cast<std::uint64_t>(config.train.seed);
  // Counted in steps, so that ranks and micro-batches of one global batch train and evaluate on the same windows.
  options.held_out = config.data.held_out;
  if (config.eval.every > 0) options.evaluation = config.eval.batches * grid.sequences_per_step();
  return options;
}

// Otherwise a step would train on the same window twice.
void require_text(const Config& config, const BatchGrid& grid, const Dataset& data) {
  const std::int64_t step = grid.sequences_per_step(), of_others = step / grid.micro_batch;
  if (step <= data.train_windows()) return;
  const std::int64_t fits = data.train_windows() / of_others;
  throw UsageError(fmt::format(
      "train.micro_batch: value {} x accumulation {} x ranks {} = {} sequences a step, but data.files have {} of {} "
      "tokens to train on ({} tokens, data.held_out {}); allowed: {}, a shorter data.sequence, or more text",
      grid.micro_batch, grid.accumulation, grid.ranks, step, data.train_windows(), config.data.sequence,
      data.num_tokens(), config.data.held_out,
      fits > 0 ? fmt::format("at most {}", fits) : "fewer ranks or a smaller accumulation"));
}

}  // namespace

RunInputs::RunInputs(const Config& config, int world)
    : grid((check_against_world(config, world), batch_grid(config, world))),
      model(make_model(config.model)),
      data(data_options(config, grid)) {
  require_text(config, grid, data);
  kernels();  // an instruction set that was asked for and is not here
  omp_set_num_threads(static_cast<int>(config.threads));
}

std::vector<Batch> RunInputs::batches(Device& device, int rank, std::int64_t step) {
  std::vector<Batch> out;
  for (std::int64_t m = 0; m < grid.accumulation; ++m) out.push_back(data.batch(device, grid, rank, step, m));
  return out;
}

std::string RunInputs::identity() const {
  return nlohmann::json{{"data", {{"tokens", data.num_tokens()}, {"hash", data.fingerprint()}}}}.dump();
}

void require_text(const Config& config, int world) {
  const BatchGrid grid = batch_grid(config, world);
  require_text(config, grid, Dataset(data_options(config, grid)));
}

void require_place(const Config& config, const LaunchPlace& place) {
  if (ranks_are_threads(config) && place.ranks > 1)
    throw UsageError(
        fmt::format("communication.backend: value '{}' runs its ranks in one process, but {} were started; allowed: "
                    "mpi, or one process and communication.sim_ranks",
                    config.communication.backend, place.ranks));
}

void require_memory(const Config& config, const MemoryForecast& of_first_rank, int world) {
  const std::int64_t limit = config.memory.limit;
  if (limit == 0 || of_first_rank.peak <= limit) return;
  throw FoundByAllRanks(
      fmt::format(
          "memory.limit: value {} ({} bytes) is less than a rank needs with {} rank{}: {} bytes, {}; allowed: 0 "
          "(no limit), or at least that; more ranks, a smaller train.micro_batch, or an "
          "activation_checkpointing.policy that keeps less, need less",
          human_bytes(limit), limit, world, world == 1 ? "" : "s", of_first_rank.peak, describe_memory(of_first_rank)),
      ExitCode::OutOfMemory);
}

std::string describe_memory(const MemoryForecast& forecast) {
  std::vector<Tag> tags(kAllTags.begin(), kAllTags.end());
  std::ranges::stable_sort(tags, [&](Tag a, Tag b) { return forecast.at_peak[index(a)] > forecast.at_peak[index(b)]; });
  std::vector<std::string> parts;
  for (const Tag tag : tags)
    if (forecast.at_peak[index(tag)] > 0 && tag != Tag::Host)
      parts.push_back(fmt::format("{} {}", name_of(tag), human_bytes(forecast.at_peak[index(tag)])));
  return fmt::format("{} at its peak ({})", human_bytes(forecast.peak), fmt::join(parts, ", "));
}

std::string describe_needs(const MemoryForecast& forecast) {
  const std::int64_t host = forecast.peak_of[index(Tag::Host)];
  return fmt::format("a rank needs {}{}", describe_memory(forecast),
                     host > 0 ? fmt::format("; beside it {} in host memory", human_bytes(host)) : "");
}

void require_writable(const std::filesystem::path& file, std::string_view option) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(file, error);
  const bool replaced = !std::filesystem::exists(status) || std::filesystem::is_regular_file(status);
  const std::filesystem::path parent = file.has_parent_path() ? file.parent_path() : ".";
  std::string why;
  if (std::filesystem::is_directory(status)) {
    why = "is a folder; allowed: a file";
  } else if (replaced && !std::filesystem::is_directory(parent, error)) {
    why = fmt::format("cannot be written: there is no folder {}", parent.string());
  } else if (::access((replaced ? parent : file).c_str(), W_OK) != 0) {
    why = fmt::format("cannot be written: {}", std::strerror(errno));
  }
  if (!why.empty()) throw UsageError(fmt::format("{}: value '{}' {}", option, file.string(), why));
}

}  // namespace regather
