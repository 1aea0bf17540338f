// TensorBoard's file: TFRecords, each an Event.
//   record  = length (u64) | masked crc of it (u32) | data | masked crc of data (u32), little endian;
//             masked(c) = rotate_right(c, 15) + 0xa282ead8, c = CRC-32C (Castagnoli)
//   Event   = 1: wall_time (double), 2: step (int64), 3: file_version (string) or 5: Summary
//   Summary = 1: Value, repeated;   Value = 1: tag (string), 2: simple_value (float)
// A field begins with its number << 3 | wire type: 0 varint, 1 eight bytes, 2 a length and bytes, 5 four bytes.
#include <array>
#include <bit>
#include <cstring>

#include "launcher/metrics.h"

namespace regather {
namespace {

static_assert(std::endian::native == std::endian::little);

template <class T>
std::string raw(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}

std::string field(unsigned number, std::string_view bytes) {
  return varint(number << 3 | 2U) + varint(bytes.size()) + std::string(bytes);
}
std::string field(unsigned number, double value) { return varint(number << 3 | 1U) + raw(value); }
std::string field(unsigned number, float value) { return varint(number << 3 | 5U) + raw(value); }
std::string field(unsigned number, std::int64_t value) {
  return varint(number << 3 | 0U) + varint(static_cast<std::uint64_t>(value));
}

std::string record(std::string_view data) {
  const auto masked = [](std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xa282ead8U; };
  const std::string length = raw(static_cast<std::uint64_t>(data.size()));
  return length + raw(masked(length)) + std::string(data) + raw(masked(data));
}

constexpr std::array<std::uint32_t, 256> make_crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1U) != 0 ? 0x82f63b78U : 0U);
    table[i] = c;
  }
  return table;
}
constexpr std::array<std::uint32_t, 256> kCrcTable = make_crc_table();

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t c = ~0U;
  for (const char byte : bytes) c = kCrcTable[(c ^ static_cast<std::uint8_t>(byte)) & 0xffU] ^ (c >> 8);
  return ~c;
}

EventsFile::EventsFile(std::filesystem::path file, double wall_time) : file_(std::move(file)) {
  file_.append(record(field(1, wall_time) + field(3, std::string_view("brain.Event:2"))));
}

void EventsFile::scalars(double wall_time, std::int64_t step,
                         const std::vector<std::pair<std::string, double>>& values) {
  std::string summary;
  for (const auto& [tag, value] : values) {
    summary += field(1, field(1, std::string_view(tag)) + field(2, static_cast<float>(value)));
  }
  file_.append(record(field(1, wall_time) + field(2, step) + field(5, summary)));
}

}  // namespace regather
