#include "launcher/run_device.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "launcher/machine.h"

namespace regather {
namespace {

using Json = nlohmann::json;

// A rank without a GPU says so, instead of leaving the others to find out that it is gone.
std::string seen_here() {
  Json mine{{"host", host_name()}, {"ids", Json::array()}, {"why", ""}};
  try {
    for (const GpuInfo& gpu : cuda_gpus()) mine["ids"].push_back(gpu.id);
  } catch (const Error& e) {
    mine["why"] = e.what();
  }
  return mine.dump();
}

std::vector<SeenGpus> seen_by_ranks(Communicator& comm) {
  std::vector<SeenGpus> seen;
  std::string why;
  for (const std::string& text : comm.exchange(seen_here())) {
    const Json of_rank = Json::parse(text);
    seen.push_back({of_rank.at("host"), of_rank.at("ids").get<std::vector<std::string>>()});
    if (why.empty() && of_rank.at("why") != "")
      why = comm.size() == 1 ? of_rank.at("why").get<std::string>()
                             : fmt::format("{} (rank {}, on {})", of_rank.at("why").get<std::string>(), seen.size() - 1,
                                           seen.back().host);
  }
  if (!why.empty()) throw UsageError(why);
  return seen;
}

RunDevice make_gpu(Communicator& comm, std::int64_t limit) {
  const std::vector<SeenGpus> seen = seen_by_ranks(comm);
  const std::vector<int> taken = choose_gpus(seen);
  const auto me = static_cast<std::size_t>(comm.rank());
  const GpuInfo gpu = cuda_gpus().at(static_cast<std::size_t>(taken[me]));
  RunDevice run;
  run.sharing = 0;
  for (std::size_t r = 0; r < seen.size(); ++r)
    run.sharing += seen[r].ids.at(static_cast<std::size_t>(taken[r])) == gpu.id ? 1 : 0;
  run.name = gpu.name;
  run.gpu = gpu;
  run.memory_of = fmt::format("{}, GPU {}", seen[me].host, taken[me]);
  run.available = gpu.memory;
  run.device = make_cuda_device(taken[me], limit);
  return run;
}

RunDevice make_cpu(Communicator& comm, std::int64_t limit) {
  RunDevice run;
  run.name = processor_name();
  run.memory_of = host_name();
  run.available = available_memory();
  run.sharing = static_cast<int>(std::ranges::count(comm.exchange(run.memory_of), run.memory_of));
  run.device = std::make_unique<CpuDevice>(Allocator::Mode::Real, limit);
  return run;
}

}  // namespace

RunDevice make_run_device(const Config& config, Communicator& comm, std::int64_t limit) {
  return config.device == Config::Device::Cuda ? make_gpu(comm, limit) : make_cpu(comm, limit);
}

RunDevice take_run_device(const Config& config, Communicator& comm, std::int64_t limit) {
  RunDevice run = make_run_device(config, comm, limit);
  comm.use_memory_of(*run.device);
  if (comm.size() > 1) run.device->between_ops = [&comm] { comm.progress(); };
  return run;
}

std::vector<int> choose_gpus(std::span<const SeenGpus> of_ranks) {
  std::map<std::string, int> ranks_of;  // by the GPU's id
  std::vector<int> taken;
  for (const SeenGpus& seen : of_ranks) {
    const auto least = std::ranges::min_element(seen.ids, {}, [&](const std::string& id) { return ranks_of[id]; });
    check(least != seen.ids.end(), "a rank on {} that sees no GPU", seen.host);
    ++ranks_of[*least];
    taken.push_back(static_cast<int>(least - seen.ids.begin()));
  }
  return taken;
}

MachineLimits limits_of(const RunDevice& run, DType compute, std::chrono::milliseconds each) {
  return run.gpu ? run.gpu->limits(compute) : measure_limits(each, steady_seconds);
}

DeviceKind kind_of_device(const Config& config) {
  return config.device == Config::Device::Cuda ? DeviceKind::Cuda : DeviceKind::Cpu;
}

std::optional<GpuInfo> gpu_to_plan_for(const Config& config) {
  if (config.device == Config::Device::Cpu) return std::nullopt;
  try {
    return cuda_gpus().front();
  } catch (const UsageError&) {
    constexpr double kBytes = 2.04e12;  // a second
    return GpuInfo{.name = "an A100 of 80 GB (assumed: there is no GPU here)",
                   .memory = std::int64_t{80} << 30,
                   .major = 8,
                   .fp32 = {.flops = 19.5e12, .bytes = kBytes},
                   .bf16 = {.flops = 312e12, .bytes = kBytes}};
  }
}

std::string describe_device(const Config& config) {
  if (config.device == Config::Device::Cpu) return fmt::format("cpu: {}", processor_name());
  try {
    std::vector<std::string> names;
    for (const GpuInfo& gpu : cuda_gpus()) names.push_back(fmt::format("{}, {} MiB", gpu.name, gpu.memory >> 20));
    return fmt::format("cuda: {}", fmt::join(names, "; "));
  } catch (const UsageError& e) {
    const std::string_view why = e.what();  // "device: value cuda, but ...; allowed: cpu"
    const std::size_t begin = why.find("but ") + 4;
    return fmt::format("cuda; {}", why.substr(begin, why.rfind("; ") - begin));
  }
}

}  // namespace regather
