#include "strata/format/json_scanner.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "strata/base/error.h"
#include "strata/format/safetensors.h"

namespace strata::format {
namespace {

unsigned byte_of(char c) {
  return static_cast<unsigned char>(c);
}

// A code point that is not a surrogate.
void append_utf8(std::string& out, std::uint32_t point) {
  const auto put = [&out](std::uint32_t byte) { out += static_cast<char>(byte); };
  if (point < 0x80) {
    put(point);
  } else if (point < 0x800) {
    put(0xC0 | (point >> 6U));
    put(0x80 | (point & 0x3FU));
  } else if (point < 0x10000) {
    put(0xE0 | (point >> 12U));
    put(0x80 | ((point >> 6U) & 0x3FU));
    put(0x80 | (point & 0x3FU));
  } else {
    put(0xF0 | (point >> 18U));
    put(0x80 | ((point >> 12U) & 0x3FU));
    put(0x80 | ((point >> 6U) & 0x3FU));
    put(0x80 | (point & 0x3FU));
  }
}

// How a UTF-8 sequence with this first byte goes on: its length, and the bounds of its second byte,
// which shut out overlong forms, surrogates and what lies beyond U+10FFFF. Length 0: no first byte.
struct Utf8Lead {
  std::size_t length;
  unsigned second_min;
  unsigned second_max;
};

Utf8Lead utf8_lead(unsigned byte) {
  if (byte >= 0xC2 && byte <= 0xDF) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte >= 0xE1 && byte <= 0xEF) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte >= 0xF1 && byte <= 0xF3) return {4, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

}  // namespace

void JsonScanner::fail(std::string_view problem) const {
  throw FormatError(fmt::format("{} {}: {}: path={} {}_byte={}", subject_.name, subject_.broken,
                                problem, path_, subject_.text, at_));
}

void JsonScanner::fail_twice(std::string_view key) const {
  throw FormatError(
      fmt::format("{} has a key twice: path={} key={}", subject_.name, path_, in_quotes(key)));
}

std::string_view JsonScanner::kind() {
  skip_whitespace();
  const char c = at_ < text_.size() ? text_[at_] : '\0';
  if (c == '{') return "object";
  if (c == '[') return "array";
  if (c == '"') return "string";
  if (c == 't' || c == 'f') return "boolean";
  if (c == 'n') return "null";
  if (c == '-' || (c >= '0' && c <= '9')) return "number";
  fail_wanted("a value of JSON");
}

void JsonScanner::fail_wanted(std::string_view what) const {
  if (at_ >= text_.size())
    fail(fmt::format("wanted {}, found the end of the {}", what, subject_.text));
  if (byte_of(text_[at_]) >= 0x80) {
    fail(fmt::format("wanted {}, found the byte 0x{:02x}", what, byte_of(text_[at_])));
  }
  fail(fmt::format("wanted {}, found {}", what, in_quotes(text_.substr(at_, 1))));
}

void JsonScanner::skip_whitespace() {
  while (at_ < text_.size() &&
         (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) {
    ++at_;
  }
}

bool JsonScanner::consume(char c) {
  skip_whitespace();
  if (at_ >= text_.size() || text_[at_] != c) return false;
  ++at_;
  return true;
}

void JsonScanner::expect(char c, std::string_view what) {
  if (!consume(c)) fail_wanted(what);
}

void JsonScanner::end() {
  skip_whitespace();
  if (at_ != text_.size()) fail_wanted("nothing after the closing brace");
}

std::int64_t JsonScanner::integer(std::string_view what) {
  skip_whitespace();
  const auto is_digit = [this](std::size_t i) {
    return i < text_.size() && text_[i] >= '0' && text_[i] <= '9';
  };
  if (!is_digit(at_)) fail_wanted(what);
  if (text_[at_] == '0' && is_digit(at_ + 1)) fail("a number begins with 0");
  std::int64_t value = 0;
  for (; is_digit(at_); ++at_) {
    if (__builtin_mul_overflow(value, std::int64_t{10}, &value) ||
        __builtin_add_overflow(value, std::int64_t{text_[at_] - '0'}, &value)) {
      fail(fmt::format("{} does not fit 63 bits", what));
    }
  }
  if (at_ < text_.size() && (text_[at_] == '.' || text_[at_] == 'e' || text_[at_] == 'E')) {
    fail_wanted(fmt::format("{} without fraction or exponent", what));
  }
  return value;
}

void JsonScanner::skip_value(int nesting) {
  if (nesting > kNestingMax) fail(fmt::format("a value nests deeper than {}", kNestingMax));
  skip_whitespace();
  const char c = at_ < text_.size() ? text_[at_] : '\0';
  if (c == '{') {
    distinct_object("an object", [&](const std::string&) { skip_value(nesting + 1); });
  } else if (c == '[') {
    array("an array", [&] { skip_value(nesting + 1); });
  } else if (c == '"') {
    string("a string");
  } else {  // a number or a word
    const std::size_t end = std::min(text_.find_first_of(",]} \n\t\r", at_), text_.size());
    const std::string_view token = text_.substr(at_, end - at_);
    if (!nlohmann::json::accept(token)) fail_wanted("a value of JSON");
    at_ = end;
  }
}

std::string JsonScanner::string(std::string_view what) {
  expect('"', what);
  std::string out;
  while (true) {
    if (at_ >= text_.size()) fail("a string has no end");
    const char c = text_[at_];
    if (c == '"') {
      ++at_;
      return out;
    }
    if (c == '\\') {
      ++at_;
      escape(out);
    } else if (byte_of(c) < 0x20) {
      fail("a string holds a control character that is not escaped");
    } else if (byte_of(c) >= 0x80) {
      utf8_sequence(out);
    } else {
      out += c;
      ++at_;
    }
  }
}

void JsonScanner::escape(std::string& out) {
  if (at_ >= text_.size()) fail("a string has no end");
  static constexpr std::string_view kEscapes = "\"\\/bfnrt";
  static constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
  const char c = text_[at_];
  if (const std::size_t known = kEscapes.find(c); known != std::string_view::npos) {
    out += kMeanings[known];
    ++at_;
    return;
  }
  if (c != 'u') fail_wanted("an escape of JSON after '\\'");
  ++at_;
  std::uint32_t point = hex4();
  if (point >= 0xDC00 && point <= 0xDFFF) fail("an escaped surrogate has no first half");
  if (point >= 0xD800 && point <= 0xDBFF) {
    if (text_.substr(at_, 2) != "\\u") fail("an escaped surrogate has no second half");
    at_ += 2;
    const std::uint32_t low = hex4();
    if (low < 0xDC00 || low > 0xDFFF) fail("an escaped surrogate has no second half");
    point = 0x10000 + ((point - 0xD800) << 10U) + (low - 0xDC00);
  }
  append_utf8(out, point);
}

std::uint32_t JsonScanner::hex4() {
  std::uint32_t value = 0;
  for (int i = 0; i < 4; ++i, ++at_) {
    const char c = at_ < text_.size() ? text_[at_] : '\0';
    value <<= 4U;
    if (c >= '0' && c <= '9') {
      value |= byte_of(c) - byte_of('0');
    } else if (c >= 'a' && c <= 'f') {
      value |= byte_of(c) - byte_of('a') + 10;
    } else if (c >= 'A' && c <= 'F') {
      value |= byte_of(c) - byte_of('A') + 10;
    } else {
      fail_wanted("four hexadecimal digits after '\\u'");
    }
  }
  return value;
}

void JsonScanner::utf8_sequence(std::string& out) {
  const Utf8Lead lead = utf8_lead(byte_of(text_[at_]));
  bool valid = lead.length != 0 && text_.size() - at_ >= lead.length;
  for (std::size_t i = 1; valid && i < lead.length; ++i) {
    const unsigned byte = byte_of(text_[at_ + i]);
    valid = i == 1 ? byte >= lead.second_min && byte <= lead.second_max : (byte & 0xC0U) == 0x80;
  }
  if (!valid) fail("a string is not valid UTF-8");
  out.append(text_, at_, lead.length);
  at_ += lead.length;
}

}  // namespace strata::format
