#include "ckpt/marks.h"

#include <gtest/gtest.h>

namespace regather {
namespace {

const Marks kMarks{"attn.norm", "attn.qkv", "attn.core", "attn.out", "mid", "mlp.norm", "mlp.up", "mlp.act"};

TEST(Marks, ANameIsAMarkItsLastPartAPatternOrALevel) {
  const auto expand = [](const std::vector<std::string>& names) { return expand_marks(names, kMarks); };
  EXPECT_EQ(expand({"attn.out"}), Marks{"attn.out"});
  EXPECT_EQ(expand({"mid"}), Marks{"mid"});
  EXPECT_EQ(expand({"qkv"}), Marks{"attn.qkv"});
  EXPECT_EQ(expand({"norm"}), (Marks{"attn.norm", "mlp.norm"}));
  EXPECT_EQ(expand({"attn.*"}), (Marks{"attn.norm", "attn.qkv", "attn.core", "attn.out"}));
  EXPECT_EQ(expand({"*.n?rm"}), (Marks{"attn.norm", "mlp.norm"}));
  EXPECT_EQ(expand({"*"}), kMarks);
  EXPECT_EQ(expand({"norms"}), (Marks{"attn.norm", "mlp.norm"}));
  EXPECT_EQ(expand({"attention_core"}), Marks{"attn.core"});
  EXPECT_EQ(expand({"mlp"}), (Marks{"mlp.up", "mlp.act"}));
  EXPECT_EQ(expand({}), Marks{});
}

TEST(Marks, AreInTheOrderOfTheBlockAndOnce) {
  EXPECT_EQ(expand_marks({"mlp", "qkv", "mlp.up", "*.qkv"}, kMarks), (Marks{"attn.qkv", "mlp.up", "mlp.act"}));
}

TEST(Marks, ANameThatStandsForNothingIsRefused) {
  for (const char* name : {"attn", "attn.", "tn.out", "mlp.*x", "levels", ""}) {
    std::string text;
    try {
      expand_marks({"mid", name}, kMarks);
    } catch (const UsageError& e) {
      text = e.what();
    }
    EXPECT_TRUE(text.starts_with("'" + std::string(name) + "' matches no mark")) << name << ": " << text;
    for (const std::string& mark : kMarks) EXPECT_NE(text.find(mark), std::string::npos) << text;
  }
  EXPECT_THROW(expand_marks({"mlp"}, {"attn.out"}), UsageError) << "a level of which the model has nothing";
}

}  // namespace
}  // namespace regather
