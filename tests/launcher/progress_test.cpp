#include "launcher/progress.h"

#include <gtest/gtest.h>

#include <limits>

#include <cstdlib>
#include <set>

namespace regather {
namespace {

Config config(const std::string& rest) { return parse_config("data: {files: [a]}\n" + rest, "c", {}); }

// What a Progress prints.
class Printed {
 public:
  Printed() : file_(std::tmpfile()) {}
  ~Printed() { std::fclose(file_); }
  std::FILE* file() { return file_; }
  std::string text() {
    std::string all;
    std::rewind(file_);
    for (int c; (c = std::fgetc(file_)) != EOF;) all += static_cast<char>(c);
    return all;
  }

 private:
  std::FILE* file_;
};

StepMetrics at(std::int64_t step) {
  return {.step = step,
          .loss = 3.1234,
          .grad_norm = 1.5,
          .lr = 3e-4,
          .tokens = 2048,
          .seconds = 2,
          .peak_bytes = 3 << 19,
          .wire_bytes = 9};
}

TEST(Progress, IsAPlainLineAStepWhereThereIsNoTerminal) {
  Printed printed;
  {
    Progress progress(printed.file(), Terminal::No, 50);
    progress.step(at(10));
    progress.evaluation({.step = 10, .loss = 2.5, .seconds = 0.5});
    StepMetrics skipped = at(11);
    skipped.skipped = true;
    progress.step(skipped);
  }
  EXPECT_EQ(printed.text(),
            "step 10/50  loss 3.1234  grad_norm 1.5000  lr 3.00e-04  1024 tok/s\n"
            "step 10/50  eval_loss 2.5000  0.5 s\n"
            "step 11/50  loss 3.1234  grad_norm 1.5000  lr 3.00e-04  1024 tok/s  skipped\n");
}

TEST(Progress, IsOneLineThatIsRedrawnOnATerminal) {
  Printed printed;
  {
    Progress progress(printed.file(), Terminal::Plain, 4, 80);
    progress.step(at(1));
    progress.step(at(2));
  }
  const std::string clear = "\r\033[K";
  EXPECT_EQ(printed.text(), clear + "[#######.....................] 1/4  loss 3.1234  1024 tok/s  1.5 MiB  0:06 left" +
                                clear +
                                "[##############..............] 2/4  loss 3.1234  1024 tok/s  1.5 MiB  0:04 left\n");
}

TEST(Progress, HasColoursOnlyWhereTheyAreWanted) {
  Printed plain, coloured;
  {
    Progress(plain.file(), Terminal::Plain, 4, 80).step(at(1));
    Progress(coloured.file(), Terminal::Colour, 4, 80).step(at(1));
  }
  EXPECT_EQ(plain.text().find("\033[3"), std::string::npos);
  EXPECT_NE(coloured.text().find("\033[32m"), std::string::npos);
}

TEST(Progress, FitsANarrowTerminal) {
  Printed printed;
  Progress(printed.file(), Terminal::Plain, 4, 40).step(at(1));
  EXPECT_EQ(printed.text(), "\r\033[K1/4  loss 3.1234  1024 tok/s  1.5 MiB  \n");
}

TEST(Progress, NotesComeAboveTheBar) {
  Printed printed;
  {
    Progress progress(printed.file(), Terminal::Plain, 4, 40);
    progress.step(at(1));
    progress.note("hello");
  }
  const std::string clear = "\r\033[K", bar = "1/4  loss 3.1234  1024 tok/s  1.5 MiB  ";
  EXPECT_EQ(printed.text(), clear + bar + clear + "hello\n" + clear + bar + "\n");
}

TEST(Progress, AFileIsNoTerminal) {
  Printed printed;
  EXPECT_EQ(terminal_of(printed.file()), Terminal::No);
}

TEST(Banner, SaysWhichLayersAreCheckpointed) {
  const auto text = [](const std::string& keys) {
    return describe_checkpointing(config("activation_checkpointing: {" + keys + "}\n"));
  };
  EXPECT_EQ(text("policy: none"), "none: all that is costly is kept");
  EXPECT_EQ(text("policy: full"), "full: layers 0-5 of 6");
  EXPECT_EQ(text("policy: every_n_layers"), "every_n_layers 2: layers 0, 2, 4 of 6");
  EXPECT_EQ(text("policy: every_n_layers, every_n_layers: 100"), "every_n_layers 100: layers 0 of 6");
  EXPECT_EQ(text("policy: segments"), "segments 2: layers 0-5 of 6");
  EXPECT_EQ(text("policy: layers, layers: [5, 1, 2, 3]"), "layers: layers 1-3, 5 of 6");
}

TEST(Banner, SaysWhatAPlanOffloads) {
  Config c = config("model: {layers: 3}\nactivation_checkpointing: {policy: budget, offload: auto}\n");
  SavePlan moves = keep_only({"mid", "attn.core"});
  c.activation_checkpointing.planned = {moves, moves, keep_costly()};
  EXPECT_EQ(describe_checkpointing(c), "budget: layers 0, 1 of 3; attn.core, mid kept; nothing is offloaded");
  moves.inputs = moves.marks["mid"] = Placement::Offload;
  c.activation_checkpointing.planned = {moves, moves, keep_costly()};
  EXPECT_EQ(describe_checkpointing(c), "budget: layers 0, 1 of 3; attn.core, mid kept; offloaded: input, mid in 0, 1");
}

TEST(Banner, SaysWhatAStepIs) {
  EXPECT_EQ(describe_batch(config("train: {micro_batch: 3, accumulation: 2}\n"), 4),
            "micro_batch 3 x accumulation 2 x ranks 4 = 24 sequences, 6144 tokens a step");
}

TEST(Banner, CountsParametersByWhatIsDoneWithThem) {
  Model model;
  model.units.push_back({"wte", {{"wte", Shape{10, 4}}}});
  model.units.push_back({"block 0",
                         {{"w", Shape{4, 4}},
                          {"b", Shape{4}, zeros(), /*decay=*/false},
                          {"frozen", Shape{100}, zeros(), /*decay=*/true, /*trainable=*/false}}});
  const ParameterCounts counts = parameter_counts(model);
  EXPECT_EQ(counts.all, 160);
  EXPECT_EQ(counts.trainable, 60);
  EXPECT_EQ(counts.largest_block, 40);
  EXPECT_EQ(counts.decay, 56);
  EXPECT_EQ(counts.decay_tensors, 2);
  EXPECT_EQ(counts.no_decay, 4);
  EXPECT_EQ(counts.no_decay_tensors, 1);
}

TEST(Banner, SaysWhatTheReduceModeCosts) {
  const ParameterCounts parameters = {.all = 3 << 20, .trainable = 1 << 20, .largest_block = 1 << 19};
  const auto text = [&](const std::string& keys) { return describe_reduce(config(keys), parameters, 4); };
  const std::string each = "each_micro_batch: gradients take ";
  EXPECT_EQ(text(""), "gradients take 1.0 MiB a rank");
  EXPECT_EQ(text("train: {reduce: once}\n"), "gradients take 1.0 MiB a rank");
  EXPECT_EQ(text("train: {accumulation: 2}\n"), each + "1.0 MiB a rank (once: 5.0 MiB)");
  EXPECT_EQ(text("train: {accumulation: 2, reduce: once}\n"),
            "once: gradients take 5.0 MiB a rank (each_micro_batch: 1.0 MiB)");
  EXPECT_EQ(text("train: {accumulation: 2, accumulation_order: layer_major}\n"),
            each + "3.0 MiB a rank (once: the same)");
  EXPECT_EQ(text("train: {accumulation: 2}\nsharding: {strategy: optimizer}\n"),
            each + "5.0 MiB a rank (once: the same)");
  EXPECT_EQ(text("train: {accumulation: 2}\nsharding: {strategy: none}\n"), each + "4.0 MiB a rank (once: the same)");
}

TEST(Banner, SaysWhatIsSharded) {
  const auto text = [](const std::string& keys) { return describe_sharding(config("sharding: {" + keys + "}\n")); };
  EXPECT_EQ(text(""), "full, 2 resident slots, prefetch 1");
  EXPECT_EQ(text("resident_slots: 1"), "full, 1 resident slot, prefetch 0");
  // No slots where every rank has all parameters.
  EXPECT_EQ(text("strategy: gradients"), "gradients: of gradients and optimizer state; each rank has all parameters");
  EXPECT_EQ(text("strategy: optimizer"), "optimizer: of optimizer state; each rank has all parameters and gradients");
  EXPECT_EQ(text("strategy: none"), "none: each rank has everything (data parallel)");
}

TEST(Banner, SaysWhereAndOnWhatARunRuns) {
  RunBanner banner = {.ranks = 2, .threads = 1, .cpus = 2, .host = "here", .ranks_here = 2, .cpus_here = 2};
  banner.parameters = {
      .all = 100, .trainable = 90, .decay_tensors = 3, .decay = 80, .no_decay_tensors = 2, .no_decay = 10};
  const std::string text = start_banner(config("output: runs/x\n"), banner);
  EXPECT_EQ(text.find("regather 0."), 0U);
  EXPECT_EQ(text.substr(text.find('\n') + 1),
            "  ranks          2 (mpi), 1 thread each, 2 CPUs allowed on here\n"
            "  model          gpt2, 6 layers, 100 parameters (90 trained)\n"
            "  weight decay   3 tensors with (80 elements), 2 without (10 elements)\n"
            "  batch          micro_batch 4 x accumulation 1 x ranks 2 = 8 sequences, 2048 tokens a step\n"
            "  sharding       full, 2 resident slots, prefetch 1\n"
            "  checkpointing  full: layers 0-5 of 6\n"
            "  reduce         gradients take 180 B a rank\n"
            "  output         runs/x\n");
  EXPECT_NE(start_banner(config("precision: {compute: bf16}\n"), banner)
                .find("\n  precision      bf16; what is trained, its gradients and their sums over ranks are fp32\n"),
            std::string::npos);
}

TEST(Banner, WarnsOfMoreMemoryThanThereIs) {
  EXPECT_EQ(warn_of_memory(1 << 20, 2, "this machine", 2 << 20), "");
  EXPECT_EQ(warn_of_memory(1 << 20, 2, "this machine", 0), "");
  const std::string warning = warn_of_memory(1 << 20, 3, "this machine", 2 << 20);
  EXPECT_EQ(
      warning,
      "3 ranks on this machine need 3.0 MiB at the peak, it has 2.0 MiB available (memory.limit refuses instead)");
  const std::string text =
      start_banner(config(""), {.memory = "a rank needs 1.0 MiB at its peak", .memory_warning = warning});
  EXPECT_NE(text.find("  memory         a rank needs 1.0 MiB at its peak\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\n  warning: 3 ranks on this machine"), std::string::npos) << text;
}

TEST(Banner, WarnsOfMoreThreadsThanCpus) {
  const auto warning = [](const std::string& keys, const RunBanner& banner) {
    const std::string text = start_banner(config(keys), banner);
    const std::size_t at = text.find("  warning: ");
    return at == std::string::npos ? "" : text.substr(at);
  };
  const std::string bound =
      "  warning: the 4 threads of a rank share 1 CPU: slower, same numbers; with mpirun, --bind-to none lets a rank "
      "use "
      "every CPU\n";
  EXPECT_EQ(warning("", {.ranks = 2, .threads = 4, .cpus = 1, .ranks_here = 2, .cpus_here = 2}), bound);
  EXPECT_EQ(warning("", {.ranks = 1, .threads = 4, .cpus = 4, .ranks_here = 1, .cpus_here = 4}), "");
  // Ranks on one machine share its CPUs; those on others do not count.
  EXPECT_EQ(warning("", {.ranks = 3, .threads = 1, .cpus = 2, .ranks_here = 3, .cpus_here = 2}),
            "  warning: 3 ranks of 1 thread share 2 CPUs: slower, same numbers\n");
  EXPECT_EQ(warning("", {.ranks = 8, .threads = 1, .cpus = 1, .ranks_here = 2, .cpus_here = 2}), "");
  EXPECT_EQ(warning("", {.ranks = 2, .threads = 1, .cpus = 1, .ranks_here = 2, .cpus_here = 1}),
            "  warning: 2 ranks of 1 thread share 1 CPU: slower, same numbers\n");  // both are tied to the same one
  // Ranks that are threads share the CPUs of their process, and no launcher can give them more.
  const std::string sim = "communication: {backend: sim, sim_ranks: 2}\n";
  EXPECT_EQ(warning(sim, {.ranks = 2, .threads = 4, .cpus = 4, .ranks_here = 1, .cpus_here = 4}),
            "  warning: 2 ranks of 4 threads share 4 CPUs: slower, same numbers\n");
  EXPECT_EQ(warning(sim, {.ranks = 2, .threads = 2, .cpus = 4, .ranks_here = 1, .cpus_here = 4}), "");
}

TEST(Banner, TheAllowedCpusAreToldApart) {
  const std::vector<int> cpus = allowed_cpus();
  EXPECT_GE(cpus.size(), 1U);
  EXPECT_EQ(std::set<int>(cpus.begin(), cpus.end()).size(), cpus.size());
}

TEST(EndLine, SaysHowFarARunCameAndWhereItsResultsAre) {
  RunSummary s;
  s.config = config("train: {steps: 50, stop_after: 7}\n");
  s.loss = {5, 2.5};
  s.tokens_per_second = 1975.4;
  s.memory.peak = 3 << 19;
  const std::string rest = ", loss 2.5000, 1975 tok/s, 1.5 MiB a rank at most; see runs/x/summary.json";
  s.steps = 50;
  EXPECT_EQ(end_line(s, RunEnd::AsAsked, "runs/x/summary.json"), "done: 50 steps" + rest);
  EXPECT_EQ(end_line(s, RunEnd::Signal, "runs/x/summary.json"), "done: 50 steps" + rest);  // it came in the last one
  s.steps = 7;
  EXPECT_EQ(end_line(s, RunEnd::AsAsked, "runs/x/summary.json"),
            "stopped after step 7 of 50 (train.stop_after)" + rest);
  EXPECT_EQ(end_line(s, RunEnd::Signal, "runs/x/summary.json"), "stopped after step 7 of 50 (a signal)" + rest);
  s.skipped_steps = 2;
  EXPECT_EQ(end_line(s, RunEnd::Signal, "runs/x/summary.json"),
            "stopped after step 7 of 50 (a signal), 2 of them skipped as not finite" + rest);
  s.steps = s.skipped_steps = 50;
  s.loss.back() = -std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(end_line(s, RunEnd::AsAsked, "x").find("done: 50 steps, all of them skipped as not finite, loss nan, "),
            0U);
}

TEST(Human, NumbersAreShort) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1536), "1.5 KiB");
  EXPECT_EQ(human_bytes(std::int64_t{3} << 40), "3.0 TiB");
  EXPECT_EQ(human_bytes(std::int64_t{3} << 50), "3072.0 TiB");
  EXPECT_EQ(human_bytes(1536 + 20), "1.5 KiB");
  EXPECT_EQ(at_least_bytes(1536 + 20), "1.6 KiB");  // what is enough
  EXPECT_EQ(at_least_bytes(1536), "1.5 KiB");
  EXPECT_EQ(human_seconds(7.4), "0:07");
  EXPECT_EQ(human_seconds(3723), "1:02:03");
  EXPECT_EQ(human_seconds(-5), "0:00");
}

}  // namespace
}  // namespace regather
