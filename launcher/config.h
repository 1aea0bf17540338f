// The configuration of a run: one struct per YAML section. A key is a field and, below it, its description: name, what
// is allowed, one line of meaning; the field's initial value is the default. That is all there is to adding one.
// (The header is as long as there are keys: it is the table.)
// Invariant: a Config that load_config() or parse_config() returned is valid in itself; whether it suits the number of
// ranks is check_against_world()'s question. It knows neither YAML (config_yaml.cpp) nor how a value is spelled
// (config_value.cpp).
#pragma once
#include <filesystem>
#include <map>
#include <span>

#include "ckpt/policy.h"
#include "launcher/config_key.h"
#include "model/registry.h"
#include "tensor/error.h"

namespace regather {

struct LoraKeys {
  LoraOptions& lora;
  void describe(Keys& k) {
    k.integer("rank", lora.rank, between(0, 1 << 16), "rank of the adapters, which alone are trained; 0: none")
        .also({"lora_r", "lora_rank", "r"});
    k.number("alpha", lora.alpha, above(0), "what an adapter computes is scaled by alpha / rank").also({"lora_alpha"});
    k.list("targets", lora.targets, "which linear layers get an adapter: names, or patterns with *")
        .also({"target_modules"});
  }
};

// config.model is a ModelConfig with every value filled in; `auto` of the vocabulary is remembered beside it, and the
// types that the program has.
std::vector<KeyOption> names_of(const ModelRegistry& models);
struct ModelSection : ModelConfig {
  std::optional<std::int64_t> chosen_vocab;
  ModelRegistry types = built_in_models();
  void describe(Keys& k) {
    k.choice("type", type, names_of(types), "the architecture").also({"name", "architecture", "model_type"});
    k.integer("layers", layers, between(1, 1 << 16), "transformer blocks")
        .also({"num_layers", "n_layer", "num_hidden_layers"});
    k.integer("hidden", hidden, between(1, 1 << 20), "channels C").also({"hidden_size", "n_embd", "d_model", "dim"});
    k.integer("heads", heads, between(1, 1 << 16), "attention heads")
        .also({"num_heads", "n_head", "num_attention_heads"});
    k.integer("kv_heads", kv_heads, between(0, 1 << 16), "llama: heads of keys and values; 0: as many as heads")
        .also({"num_key_value_heads"});
    k.integer("ffn_hidden", ffn_hidden, between(0, 1 << 22),
              "width of the MLP; 0: 4 C (gpt2), 8/3 C rounded up to a multiple of 64 (llama)")
        .also({"intermediate_size", "n_inner"});
    k.number("rope_theta", rope_theta, above(0), "llama: base of the rotary frequencies");
    k.auto_or_integer("vocab", chosen_vocab, between(2, 1 << 30), "vocabulary; auto: the tokenizer's (bytes: 256)")
        .also({"vocab_size"});
    k.integer("max_sequence", max_sequence, between(1, 1 << 30), "longest sequence the model can read")
        .also({"block_size", "n_positions", "max_position_embeddings"});
    k.number("dropout", dropout, from_below(0, 1), "probability that a value is dropped while training");
    k.flag("tie_embeddings", tie_embeddings, "the head uses the embedding's table").also({"tie_word_embeddings"});
    k.number("init_std", init_std, above(0), "standard deviation of initial weights").also({"initializer_range"});
    k.list("frozen", frozen, "parameters that are not trained: names, or patterns with *").also({"freeze"});
    LoraKeys adapters{lora};
    k.section("lora", adapters, "low-rank adapters of linear layers; everything else is frozen");
  }
};

struct DataConfig {
  std::vector<std::string> files;  // absolute once loaded
  std::string tokenizer = "bytes";
  std::int64_t sequence = 256, held_out = 0;
  void describe(Keys& k) {
    k.list("files", files, "text to train on; relative paths are relative to the configuration file")
        .also({"path", "dataset", "train_files", "file"})
        .needed();
    k.text("tokenizer", tokenizer, "bytes: every byte is a token").later();
    k.integer("sequence", sequence, between(1, 1 << 30), "tokens T of a sequence")
        .also({"seq_len", "sequence_length", "max_length", "block_size", "seq_length"});
    k.integer("held_out", held_out, between(0, 1e12),
              "sequences at the end of the text that are never trained on; evaluation reads the last of the text")
        .also({"validation_split", "val_size", "eval_split"});
  }
};

struct OptimizerConfig {
  enum class Type { AdamW, Sgd } type = Type::AdamW;
  double lr = 3.0e-4;
  std::array<double, 2> betas = {0.9, 0.95};
  double eps = 1.0e-8, weight_decay = 0.1;
  void describe(Keys& k) {
    k.choice("type", type, {"adamw", "sgd"}, "the optimizer").also({"name", "optim"});
    k.number("lr", lr, at_least(0), "learning rate at its highest").also({"learning_rate", "max_lr", "peak_lr"});
    k.two_numbers("betas", betas, from_below(0, 1), "adamw: decay of the two moments")
        .also({"adam_betas", "beta1", "beta2"});
    k.number("eps", eps, above(0), "adamw: added to the root of the second moment").also({"epsilon", "adam_epsilon"});
    k.number("weight_decay", weight_decay, at_least(0),
             "decoupled decay of matrices; biases, norms and other vectors have none")
        .also({"wd"});
  }
};

struct ScheduleConfig {
  enum class Type { Cosine, Constant } type = Type::Cosine;
  std::int64_t warmup_steps = 0;
  double min_lr = 0;
  void describe(Keys& k) {
    k.choice("type", type, {"cosine", "constant"}, "the learning rate after the warm-up").also({"lr_scheduler_type"});
    k.integer("warmup_steps", warmup_steps, between(0, 1e12),
              "at step s of these the rate is lr * s / warmup_steps; may exceed steps")
        .also({"warmup", "warmup_iters", "num_warmup_steps"});
    k.number("min_lr", min_lr, at_least(0), "cosine: the rate at the last step; with 0 that step changes nothing")
        .also({"lr_min", "eta_min"});
  }
};

struct TrainConfig {
  std::int64_t steps = 50, stop_after = 0;
  std::int64_t micro_batch = 4, accumulation = 1, global_batch = 0;
  enum class AccumulationOrder { BatchMajor, LayerMajor } accumulation_order = AccumulationOrder::BatchMajor;
  enum class Reduce { EachMicroBatch, Once } reduce = Reduce::EachMicroBatch;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  double clip_grad_norm = 1.0;
  enum class Nonfinite { Error, Skip } nonfinite = Nonfinite::Error;
  std::int64_t seed = 1;
  void describe(Keys& k) {
    k.integer("steps", steps, between(1, 1e12), "optimizer steps")
        .also({"num_epochs", "epochs", "max_steps", "max_iters", "num_steps", "train_steps"});
    k.integer("stop_after", stop_after, between(0, 1e12),
              "leave cleanly after this step, as on a signal; 0: after the last");
    k.integer("micro_batch", micro_batch, between(1, 1 << 20), "sequences of a rank and micro-batch")
        .also({"batch_size", "micro_batch_size", "per_device_train_batch_size"});
    k.integer("accumulation", accumulation, between(1, 1 << 20), "micro-batches M of a step")
        .also({"gradient_accumulation_steps", "grad_accum", "accumulation_steps", "accumulate"});
    k.integer("global_batch", global_batch, between(0, 1e12),
              "sequences of a step; 0: micro_batch * accumulation * ranks, which it must equal if given")
        .also({"global_batch_size", "train_batch_size"});
    k.choice("accumulation_order", accumulation_order, {"batch_major", "layer_major"},
             "layer_major: every micro-batch passes a block before the next block");
    k.choice("reduce", reduce, {"each_micro_batch", "once"},
             "when gradients are summed over the ranks; once: full-size gradients live through the step");
    k.section("optimizer", optimizer, "the optimizer");
    k.section("schedule", schedule, "the learning rate over the steps");
    k.number("clip_grad_norm", clip_grad_norm, at_least(0), "largest norm of the whole gradient; 0: not clipped")
        .also({"grad_clip", "max_grad_norm", "gradient_clipping", "clip_grad"});
    k.choice("nonfinite", nonfinite, {"error", "skip"},
             "a loss or gradient that is not finite: end the run, or skip the step");
    k.integer("seed", seed, at_least(0), "of initial weights, data order and dropout");
  }
};

struct EvalConfig {
  std::int64_t every = 0, batches = 8;
  void describe(Keys& k) {
    k.integer("every", every, between(0, 1e12), "evaluate after every so many steps; 0: never")
        .also({"eval_every", "eval_interval", "eval_steps", "interval"});
    k.integer("batches", batches, between(1, 1 << 20),
              "an evaluation reads the sequences of so many steps; they are not trained on")
        .also({"eval_iters", "num_batches"});
  }
};

struct PrecisionConfig {
  enum class Type { Fp32, Bf16 } compute = Type::Fp32, reduce = Type::Fp32;
  void describe(Keys& k) {
    k.choice("compute", compute, {"fp32", "bf16"},
             "element type of parameters and activations in use; what is trained and its gradients are fp32")
        .also({"dtype", "bf16", "fp16", "amp"});
    k.choice("reduce", reduce, {"fp32"}, "element type in which gradients are summed over the ranks")
        .also({"reduce_dtype"});
  }
  DType element() const { return compute == Type::Bf16 ? DType::BF16 : DType::F32; }
};

struct ShardingConfig {
  enum class Strategy { Full, Gradients, Optimizer, None } strategy = Strategy::Full;
  std::int64_t shard_size = 0, resident_slots = 2;
  std::optional<std::int64_t> prefetch;
  std::int64_t prefetch_blocks() const { return prefetch.value_or(resident_slots > 1 ? 1 : 0); }
  void describe(Keys& k) {
    k.choice("strategy", strategy, {"full", "gradients", "optimizer", "none"},
             "what is sharded: everything (ZeRO-3), gradients and optimizer (ZeRO-2), optimizer (ZeRO-1), nothing "
             "(data parallel)")
        .also({"zero_stage", "stage", "sharding_strategy"});
    k.integer("shard_size", shard_size, between(0, 1 << 20), "ranks that share one set of shards; 0: all of them")
        .later();
    k.integer("resident_slots", resident_slots, between(0, 1 << 16),
              "full blocks D that a rank holds at a time; 0: as many as pay, with policy budget and its budget 0")
        .also({"slots"});
    k.auto_or_integer("prefetch", prefetch, between(0, 1 << 16),
                      "blocks gathered ahead of their use; auto: min(1, D-1)")
        .also({"prefetch_factor", "forward_prefetch", "backward_prefetch"});
  }
};

struct OffloadConfig {
  std::vector<std::string> marks = {"none"};
  std::int64_t depth = 1, keep_last = 0;
  double fraction = 1;
  bool planned() const { return marks == std::vector<std::string>{"auto"}; }  // policy budget chooses
  bool on() const { return !planned() && marks != std::vector<std::string>{"none"}; }
  void describe(Keys& k) {
    k.list("marks", marks,
           "none; all: whatever a block keeps; marks: what it keeps by name, so not its input; auto: what policy "
           "budget plans; or a "
           "list of names as for keep, where input is the block's")
        .or_one()
        .also({"cpu_offload", "activation_offload", "activations_cpu_offload", "enable_activation_offloading"});
    k.integer("depth", depth, between(1, 1 << 16),
              "blocks that a value has to get to the host, and as many to come back before its backward");
    k.integer("keep_last", keep_last, between(0, 1 << 16), "last blocks that move nothing: their backward comes first");
    k.number("fraction", fraction, between(0, 1), "of the other blocks that move something, evenly spread");
  }
};

std::vector<KeyOption> names_of_policies();
struct CheckpointingConfig {
  std::string policy = "full";  // of policies()
  std::int64_t every_n_layers = 2, segments = 0;
  std::vector<std::int64_t> layers;
  std::vector<LayerNames> keep = {{.names = {"attn.out"}}};
  std::int64_t budget = std::int64_t{512} << 20;
  OffloadConfig offload;
  std::vector<SavePlan> planned;  // budget: of each layer (launcher/keep_plan.h); no key
  enum class Order { Auto, Lazy, Ahead, Eager } order = Order::Auto;
  std::int64_t audit = 0;
  void describe(Keys& k) {
    k.choice("policy", policy, names_of_policies(), "whose activations are dropped after forward and rerun in backward")
        .also({"mode", "type", "enabled"});
    k.integer("every_n_layers", every_n_layers, between(1, 1 << 16),
              "every_n_layers: the 1st, (1+n)th, ... layers are checkpointed (indices 0, n, 2n, ...), the others keep "
              "what none keeps")
        .also({"every_n", "selective_ac_option", "frequency"})
        .of_policy("every_n_layers");
    k.integer("segments", segments, between(0, 1 << 16), "segments: how many; 0: round(sqrt(layers))")
        .also({"num_segments"})
        .of_policy("segments");
    k.list("layers", layers, at_least(0), "layers: the indices, from 0, of those checkpointed")
        .also({"indices"})
        .of_policy("layers");
    k.list("keep", keep,
           "selective: the values kept: marks (attn.qkv, or qkv for short), patterns (mlp.*) or levels (norms, "
           "attention_core, mlp); or a list of {layers, keep}, one without layers for those not listed")
        .also({"save", "ops_to_save", "saved_ops"})
        .of_policy("selective");
    k.bytes("budget", budget,
            "budget: activation bytes of a rank, within which a step is planned to be fastest; 0: what memory.limit "
            "leaves")
        .also({"activation_memory_budget", "memory_budget"})
        .of_policy("budget");
    k.section("offload", offload,
              "kept values that wait in host memory; a value in place of the section is its marks (offload: all)",
              "marks");
    k.choice("order", order, {"auto", "lazy", "ahead", "eager"},
             "rerun when needed, or first what reads no matrix of parameters, or first everything; auto: lazy");
    k.integer("audit", audit, between(0, 1e12),
              "every so many steps one block, by turns, compares what it reruns with what forward made, by value; 0: "
              "never");
  }
};

struct MemoryConfig {
  std::int64_t limit = 0;
  void describe(Keys& k) {
    k.bytes("limit", limit, "bytes a rank may allocate; 0: no limit").also({"memory_limit", "max_memory"});
  }
};

std::vector<KeyOption> names_of_backends();
struct CommunicationConfig {
  std::string backend = "mpi";  // of backends()
  std::int64_t sim_ranks = 1;
  enum class Audit { Error, Warn } audit = Audit::Error;
  std::chrono::milliseconds timeout{60000};
  void describe(Keys& k) {
    k.choice("backend", backend, names_of_backends(),
             "mpi: ranks are the processes of mpirun or srun; sim: ranks are threads of one process; for device cuda, "
             "processes, too: nccl: each has a GPU of its own; staged: they may share GPUs");
    k.integer("sim_ranks", sim_ranks, between(1, 64), "sim: how many ranks")
        .also({"ranks", "world", "world_size", "num_ranks", "nproc"});
    k.choice("audit", audit, {"error", "warn"}, "what a step does that communicated other than planned");
    k.duration("timeout", timeout, between(1, 86400e3), "how long a collective may wait without any progress");
  }
};

struct SnapshotConfig {
  std::int64_t every = 0, keep = 2;
  bool async = true;
  std::string resume = "auto";
  void describe(Keys& k) {
    k.integer("every", every, between(0, 1e12), "save the training state after every so many steps; 0: never")
        .also({"save_every", "save_steps", "save_interval"})
        .later();
    k.integer("keep", keep, between(1, 1 << 20), "how many of the newest snapshots stay")
        .also({"save_total_limit"})
        .later();
    k.flag("async", async, "write while training goes on").later();
    k.text("resume", resume, "auto: from the newest snapshot in output, if there is one")
        .also({"resume_from_checkpoint"})
        .later();
  }
};

// Where keys were written, for messages.
struct ConfigPlaces {
  std::string file = "configuration";         // for keys that were not written
  std::map<std::string, std::string> of_key;  // path -> "file:line:column" or "--set a.b=v"
  const std::string& of(const std::string& path) const {
    const auto found = of_key.find(path);
    return found == of_key.end() ? file : found->second;
  }
};

struct Config {
  ModelSection model;
  DataConfig data;
  TrainConfig train;
  EvalConfig eval;
  PrecisionConfig precision;
  ShardingConfig sharding;
  CheckpointingConfig activation_checkpointing;
  MemoryConfig memory;
  CommunicationConfig communication;
  std::int64_t threads = 1;
  enum class Device { Cpu, Cuda } device = Device::Cpu;
  SnapshotConfig snapshot;
  std::string output = "runs/default";
  ConfigPlaces places;
  void describe(Keys& k) {
    k.section("model", model, "what is trained");
    k.section("data", data, "what it is trained on");
    k.section("train", train, "how it is trained");
    k.section("eval", eval, "evaluation between steps");
    k.section("precision", precision, "element types");
    k.section("sharding", sharding, "what each rank holds");
    k.section("activation_checkpointing", activation_checkpointing, "which activations are kept");
    k.section("memory", memory, "the allocator");
    k.section("communication", communication, "between the ranks");
    k.integer("threads", threads, between(1, 1024), "threads of a rank").also({"num_threads", "omp_num_threads"});
    k.choice("device", device, {"cpu", "cuda"}, "what computes; cuda: a GPU for each rank (docs/gpu.md)");
    k.section("snapshot", snapshot, "training state on disk");
    k.text("output", output, "folder of the run's files; refused when it exists and holds files, unless --overwrite")
        .also({"output_dir", "out_dir", "save_dir"});
  }
};

// The descriptions of every key, bound to the fields of this Config.
Keys keys_of(Config& config);

// Everything that is wrong is in one UsageError, a line each. sets: "train.steps=5", each in place of what the file
// says.
// models: what model.type may be.
Config load_config(const std::filesystem::path& file, std::span<const std::string> sets = {},
                   const ModelRegistry& models = built_in_models());
// The same from text; name stands for the file in messages. Relative data.files stay relative, and need not exist.
Config parse_config(std::string_view text, std::string_view name, std::span<const std::string> sets = {},
                    const ModelRegistry& models = built_in_models());
// The model that the configuration describes.
Model make_model(const ModelSection& section);
// A Config made in code: the same rules, and model.vocab is filled in.
void validate(Config& config);
// global_batch = micro_batch * accumulation * ranks, if given; a backend for the memory of several ranks' devices.
void check_against_world(const Config& config, std::int64_t ranks);
// Refuses what would be ignored: a key of a policy that is neither one of these nor the configuration's own, with a
// value that is not its default.
void refuse_unread_keys(const Config& config, std::span<const std::string> policies);
// Code that knows a key only by its name begins a message with it ("train.global_batch: ..."): adds where that key was
// written.
void add_place(const Config& config, Error& error);
template <class F>
decltype(auto) with_places(const Config& config, F&& f) {
  try {
    return f();
  } catch (Error& e) {
    add_place(config, e);
    throw;
  }
}
// Sequences of a step.
std::int64_t global_batch(const Config& config, std::int64_t ranks);
// What the policy makes of these layers: which it checkpoints, what each keeps, and in which segments.
CheckpointPlan checkpoint_plan(const Config& config);
// The order that the configuration asks for; none: the policy's own.
std::optional<Order> checkpoint_order(const Config& config);
// Ranks are threads of one process, not processes of mpirun or srun.
bool ranks_are_threads(const Config& config);

// The effective configuration: every key, one a line. Parses to the same Config.
std::string to_yaml(const Config& config);
// What `regather help KEY` says of a key or section; with an empty path, the list of keys. UsageError for an unknown
// one.
std::string help_on(std::string_view path, const ModelRegistry& models = built_in_models());
// docs/configuration.md.
std::string configuration_markdown();

}  // namespace regather
