// A table of texts: the same cells as aligned plain text for a terminal, or as Markdown. It does not wrap.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace regather {

class TextTable {
 public:
  // The first column is left-aligned, the others right-aligned.
  explicit TextTable(std::vector<std::string> head) : head_(std::move(head)) {}
  void row(std::vector<std::string> cells);  // as many as in the head; missing ones are empty
  void heading(std::string text);            // a line between rows that names those that follow
  std::string text(std::string_view indent) const;
  std::string markdown() const;

 private:
  struct Row {
    bool heading;
    std::vector<std::string> cells;
  };
  std::vector<std::string> head_;
  std::vector<Row> rows_;
};

}  // namespace regather
