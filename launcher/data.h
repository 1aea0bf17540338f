// The training data: files, memory-mapped and read as bytes (a token is a byte, vocabulary 256), as if they were one,
// in the order given. They are cut into windows of sequence + 1 tokens, each beginning `sequence` after the one before,
// so that every token is a target once; what is left at the end and fills no window is not used.
//
// Which window is trained on when is a function of (seed, position) alone. Sample g = 0, 1, ... of the whole run is
// window order(e)[g % n] of epoch e = g / n, where n windows are for training. order(e) sorts the windows i by their
// 64-bit number w0 + 2^32 w1, ties by i, with
//   key = mix(mix(kOrderDomain, seed), e), low word first;   w0..w3 = philox(key, {low word of i, high word of i, 0,
//   0}).
// Nothing is dropped at the end of an epoch: a batch may begin in one and end in the next. Every rank takes its own
// part of every step, so that all make the same number of steps, and the union over ranks and micro-batches depends on
// the number of sequences in a step only. An evaluation reads the last windows; those held out are
// never trained on, whether there is an evaluation or not: it changes nothing in training.
// It knows no communicator: a rank is a number.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tensor/device.h"
#include "tensor/tensor.h"

namespace regather {

// How the sequences of a step are shared out: micro-batch m of rank r holds the step's sequences
// [first_sequence(r, m), + micro_batch).
struct BatchGrid {
  std::int64_t ranks = 1, micro_batch = 1, accumulation = 1;
  std::int64_t sequences_per_step() const { return ranks * micro_batch * accumulation; }
  std::int64_t first_sequence(std::int64_t rank, std::int64_t m) const { return (m * ranks + rank) * micro_batch; }
};

struct DataOptions {
  std::vector<std::filesystem::path> files;
  std::int64_t sequence = 0;  // T
  std::uint64_t seed = 0;
  std::int64_t held_out = 0;    // of the last windows, never trained on
  std::int64_t evaluation = 0;  // how many of the last windows an evaluation reads
};

struct Batch {
  Tensor tokens, targets;                 // [B, T] int32, Tag::Workspace; targets[t] = tokens[t + 1]
  std::int64_t first_sequence = 0;        // within the step; what an RngKey wants
  std::optional<std::int64_t> counted{};  // targets that are not -1; none: to be looked up
};

class MappedFile;

class Dataset {
 public:
  // Throws UsageError, with the path or both numbers: a file that cannot be read or is empty, not enough tokens for a
  // window, no window left to train on.
  explicit Dataset(DataOptions options);
  ~Dataset();
  Dataset(const Dataset&) = delete;
  Dataset& operator=(const Dataset&) = delete;

  static constexpr std::int64_t vocab() { return 256; }
  std::int64_t num_tokens() const { return ends_.empty() ? 0 : ends_.back(); }
  std::int64_t num_windows() const { return train_windows_ + options_.held_out; }
  std::int64_t train_windows() const { return train_windows_; }

  // The window of sample g of the run.
  std::int64_t window(std::int64_t sample);
  // Steps, micro-batches and ranks count from 0.
  Batch batch(Device& device, const BatchGrid& grid, std::int64_t rank, std::int64_t step, std::int64_t micro_batch);
  // The i-th of a rank's evaluation / (ranks * micro_batch) evaluation batches; together they cover each window once.
  Batch evaluation_batch(Device& device, const BatchGrid& grid, std::int64_t rank, std::int64_t i) const;
  std::int64_t evaluation_batches(const BatchGrid& grid) const;

  // A hash of the tokens (all of up to 64 Mi, evenly spaced pieces of more), to tell data apart.
  std::uint64_t fingerprint() const;
  // Copies tokens [first, first + out.size()) of the joined files.
  void read(std::int64_t first, std::span<std::int32_t> out) const;

 private:
  Batch make_batch(Device& device, std::span<const std::int64_t> windows, std::int64_t first_sequence) const;
  void sort_epoch(std::int64_t epoch);

  DataOptions options_;
  std::vector<std::unique_ptr<MappedFile>> files_;
  std::vector<std::int64_t> ends_;  // tokens up to and with the i-th file
  std::int64_t train_windows_ = 0;
  std::int64_t epoch_ = -1;  // which order_ holds
  std::vector<std::int64_t> order_;
};

}  // namespace regather
