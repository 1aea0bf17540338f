#include "launcher/metrics.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "tests/launcher/temporary_folder.h"

namespace regather {
namespace {

std::string contents(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

// A reader of its own for what TensorBoard reads: CRC bit by bit, fields by the protobuf rules.
std::uint32_t slow_masked_crc(std::string_view bytes) {
  std::uint32_t c = ~0U;
  for (const char byte : bytes) {
    c ^= static_cast<unsigned char>(byte);
    for (int i = 0; i < 8; ++i) c = (c & 1U) != 0 ? (c >> 1) ^ 0x82f63b78U : c >> 1;
  }
  c = ~c;
  return ((c >> 15) | (c << 17)) + 0xa282ead8U;
}

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  bool done() const { return bytes_.empty(); }
  template <class T>
  T raw() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string_view take(std::size_t n) {
    if (n > bytes_.size()) throw std::runtime_error("cut off");
    const std::string_view taken = bytes_.substr(0, n);
    bytes_.remove_prefix(n);
    return taken;
  }
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0;; shift += 7) {
      const auto byte = raw<std::uint8_t>();
      value |= static_cast<std::uint64_t>(byte & 0x7fU) << shift;
      if ((byte & 0x80U) == 0) return value;
    }
  }
  std::string_view record() {
    const std::string_view length = take(8);
    EXPECT_EQ(raw<std::uint32_t>(), slow_masked_crc(length));
    const std::string_view data = take(Reader(length).raw<std::uint64_t>());
    EXPECT_EQ(raw<std::uint32_t>(), slow_masked_crc(data));
    return data;
  }

 private:
  std::string_view bytes_;
};

struct ReadEvent {
  double wall_time = 0;
  std::int64_t step = 0;
  std::string version;
  std::map<std::string, float> scalars;
};

ReadEvent read_event(std::string_view data) {
  ReadEvent event;
  for (Reader fields(data); !fields.done();) {
    switch (fields.varint()) {
      case 1 << 3 | 1: event.wall_time = fields.raw<double>(); break;
      case 2 << 3 | 0: event.step = static_cast<std::int64_t>(fields.varint()); break;
      case 3 << 3 | 2: event.version = fields.take(fields.varint()); break;
      case 5 << 3 | 2:
        for (Reader values(fields.take(fields.varint())); !values.done();) {
          EXPECT_EQ(values.varint(), 1U << 3 | 2U);
          Reader value(values.take(values.varint()));
          EXPECT_EQ(value.varint(), 1U << 3 | 2U);
          const std::string tag(value.take(value.varint()));
          EXPECT_EQ(value.varint(), 2U << 3 | 5U);
          event.scalars[tag] = value.raw<float>();
          EXPECT_TRUE(value.done());
        }
        break;
      default: ADD_FAILURE() << "unknown field"; return event;
    }
  }
  return event;
}

class MetricsTest : public ::testing::Test {
 protected:
  const testing::TemporaryFolder own_;
  const std::filesystem::path folder_ = own_.path();
};

const StepMetrics kStep = {.step = 300,
                           .loss = 3.25,
                           .grad_norm = 1.5,
                           .lr = 3e-4,
                           .tokens = 2048,
                           .seconds = 0.5,
                           .peak_bytes = 7,
                           .wire_bytes = 9};

TEST(Crc32c, HasTheKnownValues) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283U);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aaU);  // RFC 3720, B.4
  EXPECT_EQ(crc32c(""), 0U);
}

TEST_F(MetricsTest, EventsReadBack) {
  EventsFile events(folder_ / "e", 1700000000.25);
  events.scalars(1700000001.5, 1, {{"train/loss", 3.5}, {"lr", 3e-4}});
  events.scalars(1700000002.5, std::int64_t{1} << 40, {{std::string(200, 't'), -1}});
  const std::string bytes = contents(folder_ / "e");
  Reader reader(bytes);
  const ReadEvent head = read_event(reader.record());
  EXPECT_EQ(head.version, "brain.Event:2");
  EXPECT_EQ(head.wall_time, 1700000000.25);
  const ReadEvent first = read_event(reader.record());
  EXPECT_EQ(first.step, 1);
  EXPECT_EQ(first.wall_time, 1700000001.5);
  EXPECT_EQ(first.scalars, (std::map<std::string, float>{{"train/loss", 3.5F}, {"lr", 3e-4F}}));
  const ReadEvent second = read_event(reader.record());
  EXPECT_EQ(second.step, std::int64_t{1} << 40);
  EXPECT_EQ(second.scalars.at(std::string(200, 't')), -1.0F);
  EXPECT_TRUE(reader.done());
}

TEST_F(MetricsTest, AStepIsALineAndAnEventAsSoonAsItIsAppended) {
  const RunFolder run(folder_, RunFolder::Existing::Refuse);
  MetricsLog log(run);
  log.append(kStep);
  log.append(EvalMetrics{.step = 300, .loss = 2.5, .seconds = 0.25});
  std::ifstream stream(folder_ / "metrics.jsonl");
  std::string line;
  ASSERT_TRUE(std::getline(stream, line));
  const auto json = nlohmann::json::parse(line);
  EXPECT_EQ(json["step"], 300);
  EXPECT_EQ(json["loss"], 3.25);
  EXPECT_EQ(json["grad_norm"], 1.5);
  EXPECT_EQ(json["lr"], 3e-4);
  EXPECT_EQ(json["tokens"], 2048);
  EXPECT_EQ(json["tokens_per_second"], 4096);
  EXPECT_EQ(json["seconds"], 0.5);
  EXPECT_EQ(json["peak_bytes"], 7);
  EXPECT_EQ(json["wire_bytes"], 9);
  ASSERT_TRUE(std::getline(stream, line));
  EXPECT_EQ(nlohmann::json::parse(line)["eval_loss"], 2.5);

  std::filesystem::path events;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    if (entry.path().filename().string().starts_with(RunFolder::kEventsPrefix)) events = entry.path();
  }
  const std::string bytes = contents(events);
  Reader reader(bytes);
  reader.record();
  const ReadEvent event = read_event(reader.record());
  EXPECT_EQ(event.step, 300);
  EXPECT_EQ(event.scalars.at("train/loss"), 3.25F);
  EXPECT_EQ(event.scalars.at("train/grad_norm"), 1.5F);
  EXPECT_EQ(event.scalars.at("train/lr"), 3e-4F);
  EXPECT_EQ(event.scalars.at("speed/tokens_per_second"), 4096.0F);
  EXPECT_EQ(read_event(reader.record()).scalars.at("eval/loss"), 2.5F);
}

TEST_F(MetricsTest, TheFilesOfALogAreReplacedByOverwriting) {
  { const MetricsLog log(RunFolder(folder_, RunFolder::Existing::Refuse)); }
  EXPECT_THROW(RunFolder(folder_, RunFolder::Existing::Refuse), UsageError);
  RunFolder(folder_, RunFolder::Existing::Overwrite);
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(MetricsTest, NumbersThatAreNotFiniteAreNull) {
  StepMetrics m = kStep;
  m.loss = std::numeric_limits<double>::quiet_NaN();
  m.grad_norm = std::numeric_limits<double>::infinity();
  const auto json = nlohmann::json::parse(to_json_line(m));
  EXPECT_TRUE(json["loss"].is_null());
  EXPECT_TRUE(json["grad_norm"].is_null());
}

TEST_F(MetricsTest, AFileThatCannotBeWrittenIsNamed) {
  EXPECT_THROW(AppendFile(folder_ / "none/metrics.jsonl"), Error);
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full here";
  AppendFile full("/dev/full");
  try {
    full.append("x");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()), "/dev/full: cannot be written: No space left on device");
  }
}

}  // namespace
}  // namespace regather
