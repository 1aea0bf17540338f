#include "launcher/fit.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <optional>

#include "launcher/calibrate.h"
#include "launcher/compare.h"
#include "launcher/fit_report.h"
#include "launcher/keep_plan.h"
#include "launcher/machine.h"
#include "launcher/preflight.h"
#include "launcher/progress.h"
#include "launcher/run_device.h"
#include "launcher/summary.h"
#include "launcher/training_run.h"
#include "tensor/host_view.h"

namespace regather {
namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 24;
constexpr int kConfirmingSteps = 2;  // what lives from the first backward on is there in the second step

// A configuration of that size under a policy that may use all of the memory.
Config sized(const Config& config, FitSize what, std::int64_t n) {
  Config c = config;
  (what == FitSize::Sequence ? c.data.sequence : c.train.micro_batch) = n;
  c.model.max_sequence = std::max(c.model.max_sequence, c.data.sequence);  // a table of positions grows along
  c.train.global_batch = 0;
  return c;
}

// How large it can be whatever the memory is, and what there is to say to one more.
struct Most {
  std::int64_t size = 0;
  FitBound bound = FitBound::Search;
  std::string one_more{};
};

// The same on every rank: the text of the one that has least.
Most most_of(const Config& config, FitSize what, Communicator& comm) {
  const auto refused = [&](std::int64_t n) {
    try {
      require_text(sized(config, what, n), comm.size());
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const std::int64_t other = what == FitSize::Sequence ? config.train.micro_batch : config.data.sequence,
                     searched = std::max<std::int64_t>(1, kMostTokens / other);
  Most most{largest_that_fits(searched, [&](std::int64_t n) { return refused(n).empty(); })};
  for (const std::string& of_rank : comm.exchange(fmt::format("{}", most.size)))
    most.size = std::min<std::int64_t>(most.size, std::stoll(of_rank));
  if (most.size == 0) with_places(config, [&] { require_text(sized(config, what, 1), comm.size()); });
  if (most.size == searched) {
    most.one_more = fmt::format("no more than {} tokens of a micro-batch are tried", kMostTokens);
  } else {
    most.bound = FitBound::Text;
    most.one_more = refused(most.size + 1);
  }
  return most;
}

// What the first rank says while a search takes longer than a person waits without a word.
class Waiting {
 public:
  Waiting(const Communicator& comm, double patience)
      : speaks_(comm.rank() == 0), patience_(patience), last_(steady_seconds()) {}
  void trying(const std::string& what) {
    if (steady_seconds() - last_ >= patience_) say("trying " + what);
  }
  void training(const std::string& what, double seconds) {
    if (seconds >= patience_) say(fmt::format("training {}, for about {:.0f} s", what, seconds));
  }

 private:
  void say(const std::string& line) {
    last_ = steady_seconds();
    if (!speaks_) return;
    fmt::print("  {}\n", line);
    std::fflush(stdout);
  }
  bool speaks_;
  double patience_, last_;
};

class Fitting {
 public:
  Fitting(const Config& config, const FitOptions& options, Communicator& comm, const CostModel& costs, Waiting& waiting)
      : config_(config), options_(options), comm_(comm), costs_(costs), waiting_(waiting) {}

  FitAnswer find(FitSize what, const Most& most) const {
    const auto named = [&](std::int64_t n) {
      return fmt::format("{}, {} {}", config_.activation_checkpointing.policy, name_of(what), n);
    };
    FitAnswer answer{.what = what};
    answer.largest = largest_that_fits(most.size, [&](std::int64_t n) {
      waiting_.trying(named(n));
      return fits(sized(config_, what, n));
    });
    answer.bound = answer.largest < most.size ? FitBound::Memory : most.bound;
    answer.refused =
        answer.bound == FitBound::Memory ? refusal(sized(config_, what, answer.largest + 1)) : most.one_more;
    if (answer.largest == 0) return answer;
    const Config config = as_run(sized(config_, what, answer.largest)).value();
    const StepForecast f =
        forecast_step(config, make_model(config.model), comm_.rank(), comm_.size(), {.costs = &costs_});
    answer.planned = f.peak;
    answer.seconds = f.seconds.total();
    const RunDevice here = make_run_device(config, comm_, 0);
    std::string why;
    if (options_.confirm == FitOptions::Confirm::No)
      why = kNotAskedFor;
    else if (here.available > 0 && f.peak * here.sharing > here.available)
      why = fmt::format("{} has {} left for its {} rank{}", here.memory_of, human_bytes(here.available), here.sharing,
                        here.sharing == 1 ? "" : "s");
    for (const std::string& of_rank : comm_.exchange(why))  // one decision: the first that has a reason
      if (answer.unconfirmed.empty()) answer.unconfirmed = of_rank;
    if (!answer.unconfirmed.empty()) return answer;
    waiting_.training(named(answer.largest), kConfirmingSteps * answer.seconds);
    answer.measured = step_at(config);
    return answer;
  }

 private:
  // With what is planned in it; none: no plan is small enough.
  std::optional<Config> as_run(const Config& config) const {
    if (config.activation_checkpointing.policy != "budget") return config;
    Config c = config;
    c.activation_checkpointing.budget = 0;
    c.memory.limit = options_.memory;
    try {
      return settled(c, make_model(c.model), comm_.size(), costs_);
    } catch (const FoundByAllRanks&) {
      return std::nullopt;
    }
  }
  bool fits(const Config& config) const {
    const Model model = make_model(config.model);
    const auto small_enough = [&](const Config& c) {
      return forecast_step(c, model, comm_.rank(), comm_.size()).peak <= options_.memory;
    };
    if (config.activation_checkpointing.policy != "budget") return small_enough(config);
    // Keeping nothing fits: so does a plan. Else a search has to tell.
    const std::vector<SavePlan> nothing(model.blocks.size(), drop_all());
    return small_enough(with_plan(config, {.blocks = nothing, .slots = 1})) || as_run(config).has_value();
  }
  // The same step on an allocator with that limit.
  std::string refusal(const Config& config) const {
    Config c = config;
    if (c.activation_checkpointing.policy == "budget") {  // nothing is enough: the least that could be kept
      c.activation_checkpointing.policy = "full";
      if (c.activation_checkpointing.offload.planned()) c.activation_checkpointing.offload.marks = {"all"};
      c.sharding.resident_slots = 1;
    }
    try {
      forecast_step(c, make_model(c.model), comm_.rank(), comm_.size(), {.memory_limit = options_.memory});
    } catch (const OutOfMemory& e) {
      return e.what();
    }
    return "";
  }

  std::int64_t step_at(const Config& config) const {
    const Model model = make_model(config.model);
    const RunDevice run = take_run_device(config, comm_, options_.memory);
    Device& device = *run.device;
    Trainer trainer(model, device, comm_, trainer_options(config));
    for (int step = 0; step < kConfirmingSteps; ++step) {
      std::vector<Batch> batches;
      for (std::int64_t m = 0; m < config.train.accumulation; ++m) batches.push_back(batch(device, config));
      trainer.step(batches);
    }
    return device.memory.peak_total();
  }
  static Batch batch(Device& device, const Config& config) {
    const Shape shape{config.train.micro_batch, config.data.sequence};
    const auto made = [&](std::int64_t factor, std::int64_t shift) {
      Tensor t(device.memory, shape, Tag::Workspace, DType::I32);
      write_from_host(device, t.fresh<std::int32_t>(), t.numel(), [&](std::int32_t* tokens) {
        for (std::int64_t i = 0; i < shape.numel(); ++i)
          tokens[i] = static_cast<std::int32_t>((factor * i + shift) % config.model.vocab);
      });
      return t;
    };
    return {made(1, 0), made(7, 1), 0, shape.numel()};
  }

  const Config& config_;
  const FitOptions& options_;
  Communicator& comm_;
  const CostModel& costs_;
  Waiting& waiting_;
};

std::vector<std::string> policies_of(const Config& config, const FitOptions& options) {
  if (!options.policies.empty()) return options.policies;
  std::vector<std::string> policies = {"none", "full", "budget"};
  const std::string own = policy_of(config);
  if (std::ranges::find(policies, own) == policies.end()) policies.push_back(own);
  return policies;
}

// Under policy budget the plan is what memory leaves, whatever the configuration says of its own.
Config under(const Config& config, const FitOptions& options, const std::string& policy) {
  Config c = config;
  if (policy == "budget") {
    c.activation_checkpointing.budget = 0;
    c.memory.limit = options.memory;
    c.sharding.resident_slots = 0;
    c.sharding.prefetch.reset();
  }
  return with_policy(c, policy);
}

class FitProgram final : public RankProgram {
 public:
  FitProgram(const Config& config, const FitOptions& options, Communicator& comm, std::atomic<int>& code)
      : config_(config), options_(options), comm_(comm), code_(code) {}

  void run() override {
    comm_.set_where("fit");
    require_same_on_all_ranks(comm_, to_json(config_), "configurations");
    omp_set_num_threads(static_cast<int>(config_.threads));
    const Most sequence = most_of(config_, FitSize::Sequence, comm_),
               micro_batch = most_of(config_, FitSize::MicroBatch, comm_);
    if (comm_.rank() == 0) {
      fmt::print("regather fit {}: {} of a rank, {} rank{}{}\n", options_.name, human_bytes(options_.memory),
                 comm_.size(), comm_.size() == 1 ? "" : "s",
                 options_.confirm == FitOptions::Confirm::No ? "; planned, not confirmed by a step" : "");
      std::fflush(stdout);
    }
    const CostModel costs = costs_for(config_, make_run_device(config_, comm_, 0), comm_);
    Waiting waiting(comm_, options_.patience);
    std::vector<PolicyFit> fits;
    for (const std::string& policy : policies_of(config_, options_)) {
      const Config config = under(config_, options_, policy);
      const Fitting fitting(config, options_, comm_, costs, waiting);
      with_context([&] { return "policy " + policy; },
                   [&] {
                     fits.push_back({policy, fitting.find(FitSize::Sequence, sequence),
                                     fitting.find(FitSize::MicroBatch, micro_batch)});
                   });
    }
    bool any = false, confirmed = true;
    for (const PolicyFit& f : fits) {
      any = any || f.sequence.largest > 0 || f.micro_batch.largest > 0;
      confirmed = confirmed && f.sequence.confirmed() && f.micro_batch.confirmed();
    }
    if (!confirmed) code_ = static_cast<int>(ExitCode::Failed);
    if (!any) code_ = static_cast<int>(ExitCode::OutOfMemory);
    if (comm_.rank() != 0) return;
    fmt::print("\n{}\n{}\n{}", fit_table(fits, FitSize::Sequence, config_).text("  "),
               fit_table(fits, FitSize::MicroBatch, config_).text("  "), refusals(fits));
    std::fflush(stdout);
    if (!options_.json_file.empty()) write_file(options_.json_file, to_json(fits, options_, comm_.size()));
  }

 private:
  const Config& config_;
  const FitOptions& options_;
  Communicator& comm_;
  std::atomic<int>& code_;
};

}  // namespace

std::int64_t largest_that_fits(std::int64_t most, const std::function<bool(std::int64_t)>& fits) {
  if (most < 1 || !fits(1)) return 0;
  std::int64_t low = 1, high = 2;  // low fits
  while (high <= most && fits(high)) low = high, high *= 2;
  high = std::min(high, most + 1);
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

int run_fit(const Config& config, const FitOptions& options, const ReportError& report) {
  for (const std::string& policy : policies_of(config, options)) under(config, options, policy);  // unknown, impossible
  refuse_unread_keys(config, policies_of(config, options));
  std::atomic<int> code{0};
  const int failed = run_on_ranks(
      config, [&](Communicator& comm) { return std::make_unique<FitProgram>(config, options, comm, code); }, report);
  return failed != 0 ? failed : code.load();
}

}  // namespace regather
