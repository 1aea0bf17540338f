#include "launcher/text_table.h"

#include <fmt/format.h>

#include <algorithm>

namespace regather {

void TextTable::row(std::vector<std::string> cells) {
  cells.resize(head_.size());
  rows_.push_back({false, std::move(cells)});
}
void TextTable::heading(std::string text) { rows_.push_back({true, {std::move(text)}}); }

std::string TextTable::text(std::string_view indent) const {
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < head_.size(); ++c) {
    widths.push_back(head_[c].size());
    for (const Row& row : rows_)
      if (!row.heading) widths[c] = std::max(widths[c], row.cells[c].size());
  }
  std::string text;
  const auto add = [&](const std::vector<std::string>& cells) {
    std::string line = fmt::format("{}{:<{}}", indent, cells[0], widths[0]);
    for (std::size_t c = 1; c < cells.size(); ++c) line += fmt::format("  {:>{}}", cells[c], widths[c]);
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  };
  add(head_);
  for (const Row& row : rows_) {
    if (row.heading)
      text += std::string(indent) + row.cells[0] + "\n";
    else
      add(row.cells);
  }
  return text;
}

std::string TextTable::markdown() const {
  std::string text;
  const auto add = [&](const std::vector<std::string>& cells) {
    for (const std::string& cell : cells) {
      const std::size_t begin = std::min(cell.find_first_not_of(' '), cell.size());
      text += "| ";
      for (std::size_t i = 0; i < begin; ++i) text += "&nbsp;&nbsp;";  // indents stay
      text += cell.substr(begin) + " ";
    }
    text += "|\n";
  };
  add(head_);
  text += "|---";
  for (std::size_t c = 1; c < head_.size(); ++c) text += "|---:";
  text += "|\n";
  for (const Row& row : rows_) {
    std::vector<std::string> cells(head_.size());
    cells[0] = row.heading ? "**" + row.cells[0] + "**" : row.cells[0];
    add(row.heading ? cells : row.cells);
  }
  return text;
}

}  // namespace regather
