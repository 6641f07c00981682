#include "strata/cli/console.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "strata/base/error.h"
#include "strata/engine/config/value_check.h"
#include "strata/format/safetensors.h"

namespace strata::cli {
namespace {

constexpr auto kShownAfter = std::chrono::seconds(1);
constexpr auto kShownEvery = std::chrono::milliseconds(100);
constexpr int kBarColumns = 24;

constexpr std::size_t kGap = 2;

// The columns of a UTF-8 text without wide characters: its bytes without continuation bytes.
std::size_t columns_of(const std::string& text) {
  return static_cast<std::size_t>(std::ranges::count_if(
      text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80; }));
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// Takes the number that the text begins with, without its leading zeros.
std::string_view take_number(std::string_view& text) {
  std::size_t end = 0;
  while (end < text.size() && is_digit(text[end])) ++end;
  std::string_view number = text.substr(0, end);
  text.remove_prefix(end);
  number.remove_prefix(std::min(number.find_first_not_of('0'), number.size()));
  return number;
}

constexpr double kByteSizeMost = 9e18;  // of 63 bits

}  // namespace

Progress::Progress(std::string what, Bytes total, Console& console)
    : what_(std::move(what)), total_(total), console_(console), started_(console.now()) {}

Progress::~Progress() {
  if (visible_) console_.err << "\r\x1b[K" << std::flush;
}

void Progress::add(Bytes done) {
  done_ += done;
  if (!console_.err_is_terminal) return;
  const Clock::time_point now = console_.now();
  if (now - started_ < kShownAfter || (visible_ && now - shown_ < kShownEvery)) return;
  show(now);
}

void Progress::show(Clock::time_point now) {
  const double part =
      total_.value > 0 ? static_cast<double>(done_.value) / static_cast<double>(total_.value) : 1.0;
  const int full = std::clamp(static_cast<int>(part * kBarColumns), 0, kBarColumns);
  std::string bar;
  for (int i = 0; i < kBarColumns; ++i) bar += i < full ? "█" : "░";
  const double seconds = std::chrono::duration<double>(now - started_).count();
  console_.err << fmt::format("\r{} {} {:3.0f} %  {} of {}  {:.2f} GB/s\x1b[K", what_, bar,
                              100 * part, to_string(done_), to_string(total_),
                              static_cast<double>(done_.value) / 1e9 / seconds)
               << std::flush;
  shown_ = now;
  visible_ = true;
}

std::string TextTable::text() const {
  std::vector<std::size_t> widths(head_.size());
  const auto widen = [&](const std::vector<std::string>& cells) {
    for (std::size_t i = 0; i < cells.size() && i < widths.size(); ++i)
      widths[i] = std::max(widths[i], columns_of(cells[i]));
  };
  widen(head_);
  std::ranges::for_each(rows_, widen);
  const auto row_text = [&](const std::vector<std::string>& cells) {
    std::string row;
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const std::string space(widths[i] - columns_of(cells[i]), ' ');
      if (i > 0) row.append(kGap, ' ');
      row += std::ranges::find(left_, i) != left_.end() ? cells[i] + space : space + cells[i];
    }
    row.erase(row.find_last_not_of(' ') + 1);
    return row + "\n";
  };
  std::size_t all = widths.empty() ? 0 : kGap * (widths.size() - 1);
  for (const std::size_t width : widths) all += width;
  std::string line;
  for (std::size_t i = 0; i < all; ++i) line += "─";
  line += "\n";
  std::string text = row_text(head_) + line;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (std::ranges::find(lines_, i) != lines_.end()) text += line;
    text += row_text(rows_[i]);
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

bool NaturalLess::operator()(std::string_view a, std::string_view b) const {
  const std::string_view whole_a = a;
  const std::string_view whole_b = b;
  while (!a.empty() && !b.empty()) {
    if (is_digit(a.front()) && is_digit(b.front())) {
      const std::string_view left = take_number(a);
      const std::string_view right = take_number(b);
      if (left.size() != right.size()) return left.size() < right.size();
      if (left != right) return left < right;
    } else if (a.front() != b.front()) {
      return a.front() < b.front();
    } else {
      a.remove_prefix(1);
      b.remove_prefix(1);
    }
  }
  if (a.empty() != b.empty()) return a.empty();
  return whole_a < whole_b;  // "01" and "1"
}

Bytes parse_byte_size(std::string_view text, std::string_view option) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  std::string_view unit(stop, static_cast<std::size_t>(end - stop));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  const auto factor = engine::unit_factor(unit, engine::SizeText::kAnyCase);
  const double bytes = std::floor(number * factor.value_or(0));
  if (error == std::errc() && bytes >= 1 && bytes < kByteSizeMost)
    return Bytes(static_cast<std::int64_t>(bytes));
  throw UsageError(
      "{}: wanted a size above 0 with a unit, as 5GB (10^9 bytes) or 80GiB (2^30); found {}",
      option, format::in_quotes(text));
}

void write_whole(const std::string& path, const std::string& text, std::string_view option) {
  const std::string draft = path + ".draft";
  std::ofstream file(draft, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(draft, path, error);
  if (file && !error) return;
  std::filesystem::remove(draft, error);
  throw IoError("{}: cannot write {}; name a file in a folder that you may write to", option, path);
}

}  // namespace strata::cli
