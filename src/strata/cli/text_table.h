// A table of text for a terminal: columns as wide as their widest cell, the first to the left, the
// others to the right, a line below the head and above the last rows. Numbers as people read them.
// Values; safe everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace strata::cli {

class TextTable {
 public:
  explicit TextTable(std::vector<std::string> head) : head_(std::move(head)) {}
  // As many cells as the head has, or fewer.
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  // A line before the row that is added next.
  void add_line() { lines_.push_back(rows_.size()); }
  // Columns that stand to the left, too.
  void align_left(std::size_t column) { left_.push_back(column); }

  std::string text() const;

 private:
  std::vector<std::size_t> widths() const;
  std::string row_text(const std::vector<std::string>& cells,
                       const std::vector<std::size_t>& widths) const;

  std::vector<std::string> head_;
  std::vector<std::vector<std::string>> rows_;
  std::vector<std::size_t> lines_;
  std::vector<std::size_t> left_{0};
};

// 4022468096 as "4,022,468,096".
std::string with_commas(std::int64_t number);

// "1 tensor", "3 tensors".
std::string count_of(std::size_t number, const std::string& noun);

}  // namespace strata::cli
