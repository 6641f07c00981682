#include "strata/cli/console.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "strata/base/error.h"
#include "strata/engine/config/value_check.h"
#include "strata/format/safetensors.h"
#include "strata/io/folder_calls.h"

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

bool NaturalLess::operator()(const std::string& a, const std::string& b) const {
  const int order = ::strverscmp(a.c_str(), b.c_str());
  return order != 0 ? order < 0 : a < b;  // names of files may hold a null byte
}

Bytes parse_byte_size(std::string_view text, std::string_view option) {
  const double bytes = engine::parse_size(text, engine::SizeText::kAnyCase).value_or(0);
  if (bytes >= 1 && bytes < kByteSizeMost) return Bytes(static_cast<std::int64_t>(bytes));
  throw UsageError(
      "{}: wanted a size above 0 with a unit, as 5GB (10^9 bytes) or 80GiB (2^30); found {}",
      option, format::in_quotes(text));
}

void write_whole(const std::string& path, const std::string& text, std::string_view option) {
  try {
    io::write_file_atomically(path, text);
  } catch (const IoError&) {
    throw IoError("{}: cannot write {}; name a file in a folder that you may write to", option,
                  path);
  }
}

}  // namespace strata::cli
