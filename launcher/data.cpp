#include "launcher/data.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "tensor/hash.h"
#include "tensor/host_view.h"
#include "tensor/philox.h"

namespace regather {

// A file's bytes, read-only, for as long as this lives.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail(path);
    struct stat info {};
    const bool known = fstat(fd, &info) == 0;
    if (known && S_ISREG(info.st_mode) && info.st_size > 0) {
      size_ = static_cast<std::size_t>(info.st_size);
      data_ = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    }
    const int error = errno;
    close(fd);
    errno = error;
    if (!known || data_ == MAP_FAILED) fail(path);
    if (!S_ISREG(info.st_mode)) throw UsageError(fmt::format("data.files: {} is not a regular file", path.string()));
    if (size_ == 0) throw UsageError(fmt::format("data.files: {} is empty", path.string()));
  }
  ~MappedFile() { munmap(data_, size_); }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const unsigned char> bytes() const { return {static_cast<const unsigned char*>(data_), size_}; }

 private:
  [[noreturn]] static void fail(const std::filesystem::path& path) {
    throw UsageError(
        fmt::format("data.files: cannot read {}: {}", path.string(), std::generic_category().message(errno)));
  }
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

namespace {

constexpr std::uint64_t kOrderDomain = 0x77696E646F777321U;  // keeps these draws apart from all others of the same seed

std::uint64_t order_number(std::uint64_t key, std::int64_t window) {
  const auto i = static_cast<std::uint64_t>(window);
  const PhiloxBlock w = philox({static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)},
                               {static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(i >> 32), 0, 0});
  return w[0] | std::uint64_t{w[1]} << 32;
}

void check_place(const BatchGrid& grid, std::int64_t rank) {
  check(grid.ranks > 0 && grid.micro_batch > 0 && grid.accumulation > 0,
        "batch: {} ranks x {} sequences x {} micro-batches", grid.ranks, grid.micro_batch, grid.accumulation);
  check(rank >= 0 && rank < grid.ranks, "batch: rank {} of {}", rank, grid.ranks);
}

}  // namespace

Dataset::Dataset(DataOptions options) : options_(std::move(options)) {
  if (options_.files.empty()) throw UsageError("data.files: names no file");
  if (options_.sequence < 1)
    throw UsageError(fmt::format("data.sequence: must be at least 1, but is {}", options_.sequence));
  check(options_.held_out >= 0, "held_out: must be at least 0, but is {}", options_.held_out);
  for (const std::filesystem::path& path : options_.files) {
    files_.push_back(std::make_unique<MappedFile>(path));
    ends_.push_back(num_tokens() + static_cast<std::int64_t>(files_.back()->bytes().size()));
  }
  const std::int64_t windows = (num_tokens() - 1) / options_.sequence;
  if (windows < 1)
    throw UsageError(fmt::format("data.files: hold {} tokens in all, but one window of data.sequence {} needs {}",
                                 num_tokens(), options_.sequence, options_.sequence + 1));
  train_windows_ = windows - options_.held_out;
  if (train_windows_ < 1)
    throw UsageError(
        fmt::format("data.held_out: value {} leaves none of the {} windows of {} tokens in data.files to train on; "
                    "allowed: an integer from 0 to {}",
                    options_.held_out, windows, options_.sequence + 1, windows - 1));
  if (options_.evaluation > windows)
    throw UsageError(fmt::format("eval.batches: an evaluation reads {} windows of {} tokens, but data.files hold {}",
                                 options_.evaluation, options_.sequence + 1, windows));
}

Dataset::~Dataset() = default;

void Dataset::sort_epoch(std::int64_t epoch) {
  const std::uint64_t key = mix(mix(kOrderDomain, options_.seed), static_cast<std::uint64_t>(epoch));
  std::vector<std::pair<std::uint64_t, std::int64_t>> numbered;
  numbered.reserve(static_cast<std::size_t>(train_windows_));
  for (std::int64_t i = 0; i < train_windows_; ++i) numbered.emplace_back(order_number(key, i), i);
  std::sort(numbered.begin(), numbered.end());
  order_.clear();
  order_.reserve(numbered.size());
  for (const auto& [number, window] : numbered) order_.push_back(window);
  epoch_ = epoch;
}

std::int64_t Dataset::window(std::int64_t sample) {
  check(sample >= 0, "sample: must be at least 0, but is {}", sample);
  const std::int64_t epoch = sample / train_windows_;
  if (epoch != epoch_) sort_epoch(epoch);
  return order_[static_cast<std::size_t>(sample % train_windows_)];
}

Batch Dataset::batch(Device& device, const BatchGrid& grid, std::int64_t rank, std::int64_t step,
                     std::int64_t micro_batch) {
  check_place(grid, rank);
  check(step >= 0 && micro_batch >= 0 && micro_batch < grid.accumulation, "batch: step {}, micro-batch {} of {}", step,
        micro_batch, grid.accumulation);
  const std::int64_t first = grid.first_sequence(rank, micro_batch);
  std::vector<std::int64_t> windows;
  for (std::int64_t b = 0; b < grid.micro_batch; ++b)
    windows.push_back(window(step * grid.sequences_per_step() + first + b));
  return make_batch(device, windows, first);
}

std::int64_t Dataset::evaluation_batches(const BatchGrid& grid) const {
  const std::int64_t together = grid.ranks * grid.micro_batch;
  check(options_.evaluation % together == 0, "evaluation: {} windows do not fill batches of {} ranks x {} sequences",
        options_.evaluation, grid.ranks, grid.micro_batch);
  return options_.evaluation / together;
}

Batch Dataset::evaluation_batch(Device& device, const BatchGrid& grid, std::int64_t rank, std::int64_t i) const {
  check_place(grid, rank);
  check(i >= 0 && i < evaluation_batches(grid), "evaluation batch {} of {}", i, evaluation_batches(grid));
  const std::int64_t first = grid.first_sequence(rank, i);
  std::vector<std::int64_t> windows;
  for (std::int64_t b = 0; b < grid.micro_batch; ++b)
    windows.push_back(num_windows() - options_.evaluation + first + b);
  return make_batch(device, windows, first);
}

void Dataset::read(std::int64_t first, std::span<std::int32_t> out) const {
  const auto n = static_cast<std::int64_t>(out.size());
  check(first >= 0 && first + n <= num_tokens(), "read of tokens {} to {} of {}", first, first + n, num_tokens());
  auto file = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin());
  std::int64_t done = 0;
  for (; done < n; ++file) {
    const std::span<const unsigned char> bytes = files_[file]->bytes();
    const auto size = static_cast<std::int64_t>(bytes.size());
    const std::int64_t begin = first + done - (ends_[file] - size), take = std::min(n - done, size - begin);
    std::copy_n(bytes.begin() + begin, take, out.begin() + done);
    done += take;
  }
}

std::uint64_t Dataset::fingerprint() const {
  constexpr std::int64_t kPiece = 1 << 16, kPieces = 1 << 10;
  std::vector<std::int32_t> piece;
  const std::int64_t pieces = (num_tokens() + kPiece - 1) / kPiece,
                     stride = std::max<std::int64_t>(1, pieces / kPieces);
  std::uint64_t hash = mix(0, static_cast<std::uint64_t>(num_tokens()));
  for (std::int64_t i = 0; i < pieces; i += stride) {
    piece.resize(static_cast<std::size_t>(std::min(kPiece, num_tokens() - i * kPiece)));
    read(i * kPiece, piece);
    hash = mix(hash, hash_of(piece.data(), piece.size() * sizeof(std::int32_t)));
  }
  return hash;
}

Batch Dataset::make_batch(Device& device, std::span<const std::int64_t> windows, std::int64_t first_sequence) const {
  const std::int64_t t = options_.sequence;
  const Shape shape{static_cast<std::int64_t>(windows.size()), t};
  Batch batch{Tensor(device.memory, shape, Tag::Workspace, DType::I32),
              Tensor(device.memory, shape, Tag::Workspace, DType::I32), first_sequence, shape.numel()};
  const auto n = static_cast<std::size_t>(t);
  const auto fill = [&](Tensor& tensor, std::int64_t shift) {
    write_from_host(device, tensor.fresh<std::int32_t>(), tensor.numel(), [&](std::int32_t* tokens) {
      for (const std::int64_t window : windows) {
        read(window * t + shift, {tokens, n});
        tokens += t;
      }
    });
  };
  fill(batch.tokens, 0);
  fill(batch.targets, 1);
  return batch;
}

}  // namespace regather
