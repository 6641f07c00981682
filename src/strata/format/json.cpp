#include "strata/format/json.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <span>
#include <type_traits>
#include <utility>

#include "strata/format/safetensors.h"
#include "strata/io/file.h"
#include "strata/io/pending_range.h"

namespace strata::format {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kKey = "a key";

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// Parts of the parser's messages about strings, and our messages.
constexpr std::pair<std::string_view, std::string_view> kStringProblems[] = {
    {"control character", "a string holds a control character that is not escaped"},
    {"ill-formed UTF-8", "a string is not valid UTF-8"},
    {"must be followed by U+DC00", "an escaped surrogate has no second half"},
    {"must follow U+D800", "an escaped surrogate has no first half"},
    {"missing closing quote", "a string has no end"},
};

}  // namespace

std::string read_text(const std::string& path, std::string_view what, Bytes max) {
  const io::File file(path, io::File::Mode::kRead);
  const Bytes bytes = file.size();
  if (bytes > max)
    throw FormatError("{} is larger than any may be: path={} found={} max={}", what, path,
                      bytes.value, max.value);
  std::string text(bytes.size(), '\0');
  io::read_fully(file, Bytes(0), std::as_writable_bytes(std::span(text)));
  return text;
}

const JsonPlace JsonReader::kSkipped{
    .what = "a value of JSON", .other = [](std::string_view) {}, .distinct = true};

void JsonReader::fail(std::string_view problem) const {
  throw FormatError("{} {}: {}: path={} {}_byte={}", subject_.name, subject_.broken, problem, path_,
                    subject_.text, at_);
}

void JsonReader::fail_twice(std::string_view key) const {
  throw FormatError("{} has a key twice: path={} key={}", subject_.name, path_, in_quotes(key));
}

void JsonReader::fail_wanted(std::string_view what) const {
  if (at_ >= text_.size())
    fail(fmt::format("wanted {}, found the end of the {}", what, subject_.text));
  const auto byte = static_cast<unsigned char>(text_[at_]);
  if (byte >= 0x80) fail(fmt::format("wanted {}, found the byte 0x{:02x}", what, byte));
  fail(fmt::format("wanted {}, found {}", what, in_quotes(text_.substr(at_, 1))));
}

// nlohmann's SAX parser calls these functions. It tells no positions of tokens, so take_token()
// finds them in the text again: a token begins behind the one before it and its separators.
class JsonReader::Events {
 public:
  Events(JsonReader& reader, const JsonPlace& top) : reader_(reader), next_(&top) {}

  bool null() { return begin("null", nullptr), true; }
  bool boolean(bool /*value*/) { return begin("boolean", nullptr), true; }
  bool number_integer(std::int64_t /*value*/) { return number(); }
  bool number_unsigned(std::uint64_t /*value*/) { return number(); }
  bool number_float(double /*value*/, const std::string& /*text*/) { return number(); }
  bool string(std::string& text) {
    if (const JsonPlace* const place = begin("string", &JsonPlace::text)) place->text(text);
    return true;
  }
  bool binary(Json::binary_t& /*value*/) { return false; }  // JSON's text has none
  bool start_object(std::size_t /*members*/) {
    return push(begin("object", &JsonPlace::member), true);
  }
  bool key(std::string& key) {
    take_token();
    Frame& frame = frames_.back();
    after_ = After::kKey;
    if (frame.distinct && !frame.keys.insert(key).second) reader_.fail_twice(key);
    next_ = frame.place != nullptr ? &frame.place->member(key) : &kSkipped;
    return true;
  }
  bool end_object() { return pop(); }
  bool start_array(std::size_t /*elements*/) {
    return push(begin("array", &JsonPlace::element), false);
  }
  bool end_array() { return pop(); }

  // `read`: bytes of the text, and one more where the parser met its end.
  bool parse_error(std::size_t read, const std::string& /*token*/, const Json::exception& error) {
    reader_.at_ = skip(" \n\t\r", end_);
    const JsonPlace* place = nullptr;  // of the value that is wanted
    const std::string_view wanted = wanted_here(place);
    const bool text = place == nullptr ? wanted == kKey : place->text || place->other;
    if (found('"') && text) fail_string(read - 1, error.what());
    if (place != nullptr && place->integer && reader_.at_ < reader_.text_.size() &&
        is_digit(reader_.text_[reader_.at_])) {
      integer_here(place->what);  // it may say more of it
    }
    reader_.fail_wanted(wanted);
  }

  // Only whitespace may follow.
  void end() {
    reader_.at_ = skip(" \n\t\r", end_);
    if (reader_.at_ != reader_.text_.size()) reader_.fail_wanted("nothing after the closing brace");
  }

 private:
  struct Frame {
    const JsonPlace* place;  // null: skipped
    bool object;
    bool distinct;
    int skipped;                      // containers about its values that are skipped
    std::set<std::string> keys = {};  // of distinct ones
  };
  enum class After { kBeginning, kKey, kValue };

  std::size_t skip(std::string_view bytes, std::size_t from) const {
    return std::min(reader_.text_.find_first_not_of(bytes, from), reader_.text_.size());
  }
  bool found(char c) const {
    return reader_.at_ < reader_.text_.size() && reader_.text_[reader_.at_] == c;
  }

  // A token that the parser has accepted.
  void take_token() {
    const std::string_view text = reader_.text_;
    reader_.at_ = skip(" \n\t\r,:", end_);
    end_ = reader_.at_ + 1;
    const char first = text[reader_.at_];
    if (first == '"') {
      for (; text[end_] != '"'; ++end_)
        if (text[end_] == '\\') ++end_;
      ++end_;
    } else if (first == '-' || is_digit(first)) {
      constexpr std::string_view kDecimals = "0123456789";
      const auto there = [&](std::string_view any) {
        return end_ < text.size() && any.find(text[end_]) != std::string_view::npos;
      };
      end_ = skip(kDecimals, end_);
      if (there(".")) end_ = skip(kDecimals, end_ + 1);
      if (there("eE")) end_ = skip(kDecimals, end_ + 2);  // a sign or a digit follows
    } else if (first != '{' && first != '}' && first != '[' && first != ']') {
      end_ = skip("abcdefghijklmnopqrstuvwxyz", end_);  // true, false, null
    }
  }

  const JsonPlace& place_of_value() {
    if (frames_.empty() || frames_.back().object) return *next_;
    return frames_.back().place != nullptr ? frames_.back().place->element() : kSkipped;
  }

  // A value begins: its place, if that has this function, or null for a value that is skipped.
  // `function`: a member of JsonPlace; null: no place has one.
  template <typename Function>
  const JsonPlace* begin(std::string_view kind, Function function) {
    take_token();
    const JsonPlace& place = place_of_value();
    if (!frames_.empty() && frames_.back().skipped > kNestingMax)
      reader_.fail(fmt::format("a value nests deeper than {}", kNestingMax));
    after_ = After::kValue;
    if constexpr (!std::is_null_pointer_v<Function>) {
      if (place.*function) return &place;
    }
    if (!place.other) reader_.fail_wanted(place.what);
    place.other(kind);
    return nullptr;
  }

  bool push(const JsonPlace* place, bool object) {
    const int outer = frames_.empty() ? 0 : frames_.back().skipped;
    frames_.push_back(
        {place, object, place == nullptr || place->distinct, place == nullptr ? outer + 1 : 0});
    after_ = After::kBeginning;
    return true;
  }

  bool pop() {
    take_token();
    after_ = After::kValue;
    const JsonPlace* const place = frames_.back().place;
    frames_.pop_back();
    if (place != nullptr && place->end) place->end();
    return true;
  }

  bool number() {
    const JsonPlace* const place = begin("number", &JsonPlace::integer);
    if (place != nullptr) {
      place->integer(integer_here(place->what));
    } else if (found('0') && end_ - reader_.at_ > 1 && is_digit(reader_.text_[reader_.at_ + 1])) {
      reader_.fail_wanted(kSkipped.what);  // JSON ends before the second digit
    }
    return true;
  }

  std::int64_t integer_here(std::string_view what) {
    const std::string_view token = reader_.text_.substr(reader_.at_);
    if (!is_digit(token.front())) reader_.fail_wanted(what);
    if (token.size() > 1 && token[0] == '0' && is_digit(token[1]))
      reader_.fail("a number begins with 0");
    std::int64_t value = 0;
    const auto [stop, error] = std::from_chars(token.data(), token.data() + token.size(), value);
    if (error != std::errc()) reader_.fail(fmt::format("{} does not fit 63 bits", what));
    const std::size_t digits = static_cast<std::size_t>(stop - token.data());
    if (digits < token.size() && std::string_view(".eE").find(token[digits]) != std::string::npos) {
      reader_.at_ += digits;
      reader_.fail_wanted(fmt::format("{} without fraction or exponent", what));
    }
    return value;
  }

  // The token that is wanted where the text has an error, and its place if it is a value. Moves on
  // to where it begins.
  std::string_view wanted_here(const JsonPlace*& place) {
    const bool object = !frames_.empty() && frames_.back().object;
    const auto pass = [&](char c) {
      const bool there = found(c);
      if (there) reader_.at_ = skip(" \n\t\r", reader_.at_ + 1);
      return there;
    };
    if (!frames_.empty() && after_ == After::kKey && !pass(':')) return "':' after a key";
    if (!frames_.empty() && after_ == After::kValue && !pass(','))
      return object ? "',' or '}' after a member" : "',' or ']' after an element";
    if (object && after_ != After::kKey) return kKey;
    place = &place_of_value();
    return place->other ? kSkipped.what : place->what;
  }

  // `at`: the byte at which the parser refuses the string.
  [[noreturn]] void fail_string(std::size_t at, std::string_view problem) {
    reader_.at_ = std::min(at, reader_.text_.size());
    for (const auto& [theirs, ours] : kStringProblems)
      if (problem.find(theirs) != std::string_view::npos) reader_.fail(ours);
    if (problem.find("4 hex digits") != std::string_view::npos)
      reader_.fail_wanted("four hexadecimal digits after '\\u'");
    if (reader_.at_ == reader_.text_.size()) reader_.fail("a string has no end");
    reader_.fail_wanted("an escape of JSON after '\\'");
  }

  JsonReader& reader_;
  const JsonPlace* next_;  // of the value that comes, but in arrays
  std::size_t end_ = 0;    // of the last token
  After after_ = After::kBeginning;
  std::vector<Frame> frames_;  // objects and arrays about the next token
};

void JsonReader::read(const JsonPlace& top) {
  if (text_.starts_with('\xEF')) fail_wanted(top.what);  // the parser skips a byte order mark
  Events events(*this, top);
  Json::sax_parse(text_.begin(), text_.end(), &events, Json::input_format_t::json,
                  /*strict=*/false);
  events.end();
}

}  // namespace strata::format
