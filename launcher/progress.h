// What a person sees of a run: a start banner, a line or a progress bar a step, and the end. One rank speaks. Colours
// and the bar are for terminals only; elsewhere every step is a plain line. Texts are made from plain numbers, so that
// they can be tested, and nothing here measures or decides.
#pragma once
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/config.h"
#include "launcher/metrics.h"
#include "tensor/block.h"

namespace regather {

// "checkpointing     every_n_layers 2: layers 0, 2, 4 of 6"
std::string describe_checkpointing(const Config& config);
// "rank 8, alpha 16, of attn.qkv, attn.proj; everything else is frozen"
std::string describe_adapters(const LoraOptions& lora);
// "micro_batch 4 x accumulation 1 x ranks 2 = 8 sequences, 2048 tokens a step"
std::string describe_batch(const Config& config, std::int64_t ranks);
// The bytes of gradients that outlive a block's backward; if it matters, for both reduce modes. Padding is left out.
struct ParameterCounts {
  std::int64_t all = 0, trainable = 0,
               largest_block = 0;  // elements; largest_block: of the unit with most trainable ones
  std::int64_t decay_tensors = 0, decay = 0, no_decay_tensors = 0, no_decay = 0;
};
ParameterCounts parameter_counts(const Model& model);
std::string describe_reduce(const Config& config, const ParameterCounts& parameters, std::int64_t ranks);

struct RunBanner {
  std::int64_t ranks = 1, threads = 1, cpus = 1;  // cpus: that this rank may run on
  std::string host{}, device{};                   // device: what computes, if that is not the CPU
  std::int64_t ranks_here = 1, cpus_here = 1;  // on this rank's machine: how many, and CPUs that any of them may run on
  ParameterCounts parameters{};
  std::string limits{};                    // of this machine, if they were measured
  std::string memory{}, memory_warning{};  // planned of a rank (describe_needs()); see warn_of_memory
};
// "full, 2 resident slots, prefetch 1"
std::string describe_sharding(const Config& config);
// A line, if so many ranks there ("this machine", "node3, GPU 2") need more than it has; available 0: not known.
std::string warn_of_memory(std::int64_t peak, std::int64_t ranks, std::string_view there, std::int64_t available);
// A block of lines, each "  name     text", and a warning if there are more threads than CPUs.
std::string start_banner(const Config& config, const RunBanner& banner);
// CPUs that this process may run on, by their numbers; at least one.
std::vector<int> allowed_cpus();

// The last line of a run: how far it came, and where its results are.
enum class RunEnd { AsAsked, Signal };
std::string end_line(const RunSummary& summary, RunEnd end, const std::filesystem::path& file);

double without_sign_of_nan(double value);        // so that it is printed as nan, never as -nan
std::string human_bytes(std::int64_t bytes);     // "12.3 MiB"
std::string at_least_bytes(std::int64_t bytes);  // so many or more
std::string human_seconds(double seconds);       // "1:02:03", "0:07"

enum class Terminal { No, Plain, Colour };
// Plain: a terminal where NO_COLOR is set, or that has no colours.
Terminal terminal_of(std::FILE* out);

class Progress {
 public:
  // columns: width of the terminal, 0: ask.
  Progress(std::FILE* out, Terminal terminal, std::int64_t steps, int columns = 0);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void banner(std::string_view text);
  void step(const StepMetrics& metrics);
  void evaluation(const EvalMetrics& metrics);
  void note(std::string_view line);  // above the bar
  // Leaves the bar as it is; later output begins on a new line.
  void finish();

 private:
  void draw();
  void clear();
  std::string bar_line() const;

  std::FILE* out_;
  Terminal terminal_;
  std::int64_t steps_;
  int columns_;
  StepMetrics last_;
  double seconds_ = 0;  // of the steps so far but the first, which warms up
  std::int64_t timed_steps_ = 0;
  bool drawn_ = false;
};

// "step 10/50  loss 3.1234  grad_norm 1.2345  lr 3.00e-04  12345 tok/s"
std::string step_line(const StepMetrics& metrics, std::int64_t steps);

}  // namespace regather
