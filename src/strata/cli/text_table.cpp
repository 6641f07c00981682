#include "strata/cli/text_table.h"

#include <fmt/core.h>

#include <algorithm>

namespace strata::cli {
namespace {

constexpr std::size_t kGap = 2;

// The columns of a UTF-8 text without wide characters: its bytes without continuation bytes.
std::size_t columns_of(const std::string& text) {
  return static_cast<std::size_t>(std::ranges::count_if(
      text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80; }));
}

std::string line_of(std::size_t columns) {
  std::string line;
  for (std::size_t i = 0; i < columns; ++i) line += "─";
  return line + "\n";
}

}  // namespace

std::vector<std::size_t> TextTable::widths() const {
  std::vector<std::size_t> result(head_.size());
  const auto look_at = [&](const std::vector<std::string>& cells) {
    for (std::size_t i = 0; i < cells.size() && i < result.size(); ++i)
      result[i] = std::max(result[i], columns_of(cells[i]));
  };
  look_at(head_);
  for (const auto& row : rows_) look_at(row);
  return result;
}

std::string TextTable::row_text(const std::vector<std::string>& cells,
                                const std::vector<std::size_t>& widths) const {
  std::string row;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const std::string space(widths[i] - columns_of(cells[i]), ' ');
    if (i > 0) row.append(kGap, ' ');
    row += std::ranges::find(left_, i) != left_.end() ? cells[i] + space : space + cells[i];
  }
  row.erase(row.find_last_not_of(' ') + 1);
  return row + "\n";
}

std::string TextTable::text() const {
  const std::vector<std::size_t> wide = widths();
  std::size_t all = wide.empty() ? 0 : kGap * (wide.size() - 1);
  for (const std::size_t width : wide) all += width;
  std::string text = row_text(head_, wide) + line_of(all);
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (std::ranges::find(lines_, i) != lines_.end()) text += line_of(all);
    text += row_text(rows_[i], wide);
  }
  return text;
}

std::string with_commas(std::int64_t number) {
  const std::string digits = fmt::format("{}", number);
  std::string result;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    const bool cut = i > 0 && digits[i - 1] != '-' && (digits.size() - i) % 3 == 0;
    if (cut) result += ',';
    result += digits[i];
  }
  return result;
}

std::string count_of(std::size_t number, const std::string& noun) {
  return fmt::format("{} {}{}", with_commas(static_cast<std::int64_t>(number)), noun,
                     number == 1 ? "" : "s");
}

}  // namespace strata::cli
