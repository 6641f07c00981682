#include "strata/comm/peer/peer_messages.h"

#include <fmt/core.h>

#include <charconv>
#include <sstream>
#include <utility>

namespace strata::comm {
namespace {

// Each line begins with its letter, and a space where more follows.
constexpr char kHello = 'H';     // "H <rank>"
constexpr char kQuestion = 'Q';  // "Q <first> <key>"
constexpr char kFailure = 'F';   // "F <told>"
constexpr char kParts = 'P';     // "P <number> <bytes> <reserved> {<offset> <bytes>}"
constexpr std::size_t kToldMax = 3000;

// The text after the letter; absent if the line has another letter, or ends with it.
std::optional<std::string_view> after(char letter, std::string_view line) {
  if (line.size() < 3 || line[0] != letter || line[1] != ' ') return std::nullopt;
  return line.substr(2);
}

template <typename Number>
std::optional<Number> number_in(std::string_view text) {
  Number number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end) return std::nullopt;
  return number;
}

}  // namespace

std::string hello_line(int rank) {
  return fmt::format("{} {}", kHello, rank);
}

std::optional<int> rank_in_hello(std::string_view line) {
  const std::optional<std::string_view> rank = after(kHello, line);
  return rank ? number_in<int>(*rank) : std::nullopt;
}

std::string question_line(const Question& question) {
  return fmt::format("{} {} {}", kQuestion, question.first, question.key);
}

std::optional<Question> question_in(std::string_view line) {
  const std::optional<std::string_view> rest = after(kQuestion, line);
  if (!rest) return std::nullopt;
  const std::size_t space = rest->find(' ');
  if (space == std::string_view::npos || space + 1 == rest->size()) return std::nullopt;
  const auto first = number_in<std::size_t>(rest->substr(0, space));
  if (!first) return std::nullopt;
  return Question{*first, std::string(rest->substr(space + 1))};
}

std::string failure_line(std::string_view told) {
  return fmt::format("{} {}", kFailure, told.substr(0, kToldMax));
}

std::optional<std::string> failure_in(std::string_view line) {
  const std::optional<std::string_view> told = after(kFailure, line);
  return told ? std::optional(std::string(*told)) : std::nullopt;
}

std::string parts_line(const SharedParts& parts) {
  std::string text =
      fmt::format("{} {} {} {}", kParts, parts.number, parts.bytes.value, parts.reserved.value);
  for (const device::SharedHandle& piece : parts.pieces)
    text += fmt::format(" {} {}", piece.offset.value, piece.bytes.value);
  return text;
}

std::optional<SharedParts> parts_in(SocketMessage message) {
  const std::optional<std::string_view> numbers = after(kParts, message.text);
  if (!numbers) return std::nullopt;
  SharedParts parts;
  std::istringstream text{std::string(*numbers)};
  text >> parts.number >> parts.bytes.value >> parts.reserved.value;
  for (FileDescriptor& descriptor : message.descriptors) {
    device::SharedHandle piece;
    text >> piece.offset.value >> piece.bytes.value;
    piece.descriptor = std::move(descriptor);
    parts.pieces.push_back(std::move(piece));
  }
  if (text.fail()) return std::nullopt;
  return parts;
}

}  // namespace strata::comm
