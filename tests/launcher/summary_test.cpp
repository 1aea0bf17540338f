#include "launcher/summary.h"

#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "tests/launcher/temporary_folder.h"

namespace regather {
namespace {

using Json = nlohmann::ordered_json;

std::string contents(const std::filesystem::path& file) {
  std::ifstream stream(file);
  return {std::istreambuf_iterator<char>(stream), {}};
}

// Every path of an object with the type of its value, arrays by their first element.
void shape_of(const Json& json, const std::string& path, std::vector<std::string>& out) {
  if (json.is_object() && !json.empty()) {
    for (const auto& [key, value] : json.items()) shape_of(value, path + "/" + key, out);
  } else if (json.is_array() && !json.empty()) {
    shape_of(json[0], path + "/*", out);
  } else {
    out.push_back(path + (json.is_number() ? " number" : std::string(" ") + json.type_name()));
  }
}

RunSummary example() {
  RunSummary s;
  s.config = parse_config("data: {files: [a]}\n", "c", {});
  s.world = 2;
  s.device = "AMD EPYC 7B13";
  s.steps = 3;
  s.tokens_per_second = 1234.5;
  s.step_seconds = summarize_seconds(std::vector<double>{3, 1, 2});
  s.loss = {5.5, std::numeric_limits<double>::quiet_NaN(), 4.5};
  s.grad_norm = {1, 2, 3};
  s.evaluations = {{.step = 2, .loss = 5.25, .seconds = 0.5}};
  s.memory.peak = 1000;
  s.memory.at_peak = {1, 2, 3, 4, 5, 6, 7};
  s.memory.peak_of = {11, 12, 13, 14, 15, 16, 17};
  s.memory.peak_rss = 5000;
  s.memory.baseline_rss = 4000;
  s.collectives_per_step[{Collective::AllGather, "block", Pass::Forward, DType::F32}] = {6, 600, 300, 0, 0.1};
  s.collectives_per_step[{Collective::ReduceScatter, "wte", Pass::Backward, DType::F32}] = {1, 100, 50, 0, 0.1};
  s.checkpointing.recomputed_flops = 1e15;
  s.checkpointing.plan = plan_of_layers(s.config);
  return s;
}

TEST(Summary, HasTheShapeThatScriptsRead) {
  // As the reference of summary.json gives it.
  const Json reference =
      Json::parse(R"({"world": 2, "device": "NVIDIA H100", "steps": 50, "skipped_steps": 0, "tokens_per_second": 0.0,
    "step_seconds": {"min": 0, "median": 0, "max": 0}, "loss": [0], "grad_norm": [0],
    "memory_bytes": {"peak": 0,
      "at_peak": {"parameters": 0, "gathered": 0, "gradients": 0, "optimizer": 0, "activations": 0, "workspace": 0},
      "peak_of": {"parameters": 0, "gathered": 0, "gradients": 0, "optimizer": 0, "activations": 0, "workspace": 0},
      "peak_rss": 0, "baseline_rss": 0},
    "collectives": {"per_step": [{"name": "all_gather", "pass": "forward", "unit": "block", "dtype": "fp32", "count": 0,
      "bytes": 0}], "expected_matches": true},
    "checkpointing": {"policy": "full", "recomputed_flops": 0, "forward_flops": 0, "hidden_seconds": 0,
      "offload": {"bytes": 0, "host_bytes": 0, "to_host_gb_per_second": 0, "to_device_gb_per_second": 0,
        "stalled_milliseconds": 0},
      "plan": [{"layer": 0, "checkpointed": true, "keep": [], "offload": []}]},
    "predicted": {"peak_bytes": 0, "step_seconds": 0, "bytes_on_wire": 0},
    "eval": [{"step": 10, "loss": 0, "seconds": 0}]})");
  Json json = Json::parse(to_json(example()));
  EXPECT_EQ(json["config"]["model"]["layers"], 6);
  json.erase("config");
  std::vector<std::string> wanted, found;
  shape_of(reference, "", wanted);
  shape_of(json, "", found);
  EXPECT_EQ(found, wanted);
}

TEST(Summary, ValuesAreWhereTheyBelong) {
  const Json json = Json::parse(to_json(example()));
  EXPECT_EQ(json["memory_bytes"]["at_peak"]["activations"], 5);
  EXPECT_EQ(json["memory_bytes"]["peak_of"]["workspace"], 16);
  EXPECT_EQ(json["step_seconds"]["median"], 2);
  EXPECT_EQ(json["device"], "AMD EPYC 7B13");
  EXPECT_EQ(json["collectives"]["per_step"][0]["unit"], "block");
  EXPECT_EQ(json["collectives"]["per_step"][0]["count"], 6);
  EXPECT_EQ(json["collectives"]["per_step"][0]["bytes"], 300);
  EXPECT_EQ(json["collectives"]["per_step"][1]["name"], "reduce_scatter");
  EXPECT_EQ(json["checkpointing"]["policy"], "full");
  EXPECT_EQ(json["checkpointing"]["plan"].size(), 6U);
  EXPECT_EQ(json["checkpointing"]["recomputed_flops"], 1e15);
  EXPECT_TRUE(json["loss"][1].is_null());
  EXPECT_EQ(json["eval"][0]["step"], 2);
  EXPECT_EQ(json["eval"][0]["loss"], 5.25);
  RunSummary without = example();
  without.evaluations.clear();
  EXPECT_TRUE(Json::parse(to_json(without))["eval"].is_array());
}

TEST(Summary, MedianOfAnEvenNumberIsBetweenTheTwo) {
  const SecondsSummary s = summarize_seconds(std::vector<double>{4, 1, 3, 2});
  EXPECT_EQ(s.min, 1);
  EXPECT_EQ(s.median, 2.5);
  EXPECT_EQ(s.max, 4);
  EXPECT_EQ(summarize_seconds({}).max, 0);
}

TEST(Summary, ThePlanSaysWhichLayersAreCheckpointed) {
  const Config config = parse_config(
      "data: {files: [a]}\nmodel: {layers: 4}\nactivation_checkpointing: {policy: every_n_layers}\n", "c", {});
  std::vector<bool> checkpointed;
  for (const LayerPlan& layer : plan_of_layers(config)) checkpointed.push_back(layer.checkpointed);
  EXPECT_EQ(checkpointed, (std::vector<bool>{true, false, true, false}));
}

TEST(Summary, ThePlanSaysWhatEachLayerKeepsAndWhere) {
  const Config config = parse_config(
      "data: {files: [a]}\nmodel: {layers: 3}\nactivation_checkpointing: {policy: selective, keep: [{layers: [1], "
      "keep: "
      "[qkv, mid]}], offload: {marks: [input, qkv], keep_last: 1}}\n",
      "c", {});
  std::vector<std::vector<std::string>> keep, offload;
  for (const LayerPlan& layer : plan_of_layers(config)) {
    keep.push_back(layer.keep);
    offload.push_back(layer.offload);
  }
  EXPECT_EQ(keep, (std::vector<std::vector<std::string>>{{}, {"mid"}, {}}));
  EXPECT_EQ(offload, (std::vector<std::vector<std::string>>{{"input"}, {"input", "attn.qkv"}, {}}));
}

TEST(Summary, ResidentMemoryIsThatOfThisProcess) {
  const ResidentMemory memory = resident_memory();
  EXPECT_GT(memory.now, 1 << 20);
  EXPECT_GE(memory.peak, memory.now);
}

class RunFolderTest : public ::testing::Test {
 protected:
  std::string refusal(RunFolder::Existing existing) {
    try {
      RunFolder run(folder_, existing);
    } catch (const UsageError& e) {
      return e.what();
    }
    return "";
  }
  const testing::TemporaryFolder own_;
  std::filesystem::path folder_ = own_.path() / "run";
};

TEST_F(RunFolderTest, IsMadeWithItsParents) {
  RunFolder run(folder_ / "a/b", RunFolder::Existing::Refuse);
  EXPECT_TRUE(std::filesystem::is_directory(folder_ / "a/b"));
  RunFolder again(folder_ / "a/b", RunFolder::Existing::Refuse);  // empty: nothing to lose
}

TEST_F(RunFolderTest, ThatHoldsFilesIsRefused) {
  std::filesystem::create_directories(folder_);
  std::ofstream(folder_ / "notes.txt") << "x";
  EXPECT_EQ(refusal(RunFolder::Existing::Refuse),
            "output: value '" + folder_.string() +
                "' holds files already (notes.txt, ...); allowed: a folder that is new or empty, or --overwrite");
}

TEST_F(RunFolderTest, OverwritingRemovesWhatARunWritesAndNothingElse) {
  std::filesystem::create_directories(folder_ / "sub");
  const std::vector<std::string> of_run = {
      "config.yaml", "summary.json", "metrics.jsonl",      "events.out.tfevents.1.h.2.regather",
      "compare.md",  "compare.json", "compare_memory.svg", "compare_time.svg"};
  for (const std::string& name : of_run) std::ofstream(folder_ / name) << "x";
  for (const std::string name : {"notes.txt", "events.out.tfevents.1.h.2"}) std::ofstream(folder_ / name) << "x";
  EXPECT_EQ(refusal(RunFolder::Existing::Overwrite), "");
  for (const std::string& name : of_run) EXPECT_FALSE(std::filesystem::exists(folder_ / name)) << name;
  for (const std::string name : {"notes.txt", "events.out.tfevents.1.h.2", "sub"}) {
    EXPECT_TRUE(std::filesystem::exists(folder_ / name)) << name;
  }
}

TEST_F(RunFolderTest, ThatIsAFileOrCannotBeMadeIsRefused) {
  std::ofstream(folder_) << "x";
  EXPECT_EQ(refusal(RunFolder::Existing::Overwrite),
            "output: value '" + folder_.string() + "' is not a folder; allowed: a folder that is new or empty");
  folder_ /= "below";
  EXPECT_NE(refusal(RunFolder::Existing::Refuse).find("cannot be made"), std::string::npos);
  folder_ = folder_.parent_path();
}

TEST_F(RunFolderTest, FilesAreWholeAndLeaveNothingBeside) {
  RunFolder run(folder_, RunFolder::Existing::Refuse);
  run.write_summary(example());
  run.write_summary(example());
  run.write_config(example().config);
  EXPECT_EQ(contents(folder_ / "summary.json"), to_json(example()));
  EXPECT_EQ(to_yaml(parse_config(contents(folder_ / "config.yaml"), "c", {})), to_yaml(example().config));
  const auto files = std::distance(std::filesystem::directory_iterator(folder_), {});
  EXPECT_EQ(files, 2);
}

TEST_F(RunFolderTest, AFileThatCannotBeWrittenIsNamed) {
  try {
    write_file(folder_ / "none/x.json", "text");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.what(), (folder_ / "none/x.json").string() + ": cannot be written: No such file or directory");
    EXPECT_EQ(e.code(), ExitCode::Failed);
  }
}

}  // namespace
}  // namespace regather
