#include <gtest/gtest.h>

#include <fstream>

#include "launcher/config.h"

namespace regather {
namespace {

TEST(ConfigHelp, DescribesAKeyASectionAndAll) {
  EXPECT_EQ(
      help_on("sharding.resident_slots"),
      "sharding.resident_slots\n  full blocks D that a rank holds at a time; 0: as many as pay, with policy budget and "
      "its budget 0\n  default: 2\n  allowed: an integer from 0 to 65536\n");
  EXPECT_NE(
      help_on("activation_checkpointing.policy").find("\n    full            every block keeps its input only and "),
      std::string::npos);
  EXPECT_NE(help_on("precision.compute").find("allowed: fp32, bf16"), std::string::npos);
  EXPECT_NE(help_on("snapshot.every").find("allowed: 0 (others are not available in this build)"), std::string::npos);
  EXPECT_EQ(help_on("eval").find("eval.every"), 0U);
  EXPECT_NE(help_on("eval").find("\n    evaluate after every so many steps; 0: never\n"), std::string::npos);
  EXPECT_NE(help_on("").find("model.layers"), std::string::npos);
  EXPECT_THROW(help_on("model.layer"), UsageError);
}

TEST(ConfigHelp, TheDocumentationIsUpToDate) {
  std::ifstream stream(REGATHER_SOURCE_DIR "/docs/configuration.md");
  const std::string text((std::istreambuf_iterator<char>(stream)), {});
  EXPECT_EQ(text, configuration_markdown()) << "run: regather help --markdown > docs/configuration.md";
}

TEST(ConfigHelp, EveryKeyIsDescribedInALine) {
  Config config;
  Keys keys = keys_of(config);
  EXPECT_GT(keys.keys().size(), 60U);
  for (const Key& key : keys.keys()) {
    EXPECT_FALSE(key.doc.empty()) << key.path;
    EXPECT_EQ(key.doc.find('\n'), std::string::npos) << key.path;
    EXPECT_EQ(keys.find(key.path), &key) << key.path << " is described twice";
  }
}

}  // namespace
}  // namespace regather
