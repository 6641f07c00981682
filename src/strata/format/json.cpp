#include "strata/format/json.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <span>
#include <type_traits>

#include "strata/format/safetensors.h"
#include "strata/io/file.h"
#include "strata/io/pending_range.h"

namespace strata::format {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kProblemMax = 300;

// Hands the parser a text, and notes how far it has read, which its events do not tell.
struct Byte : std::iterator_traits<const char*> {
  using iterator_category = std::input_iterator_tag;
  char operator*() const { return text[*read = at]; }
  Byte& operator++() { return ++at, *this; }
  bool operator==(const Byte& other) const { return at == other.at; }
  const char* text;
  std::size_t* read;
  std::size_t at;
};

// The parser's message, without the name of the exception and the raw bytes of the text.
std::string problem_in(const Json::exception& error) {
  const std::string_view whole = error.what();
  const std::string_view problem = whole.substr(whole.find("] ") + 2);
  return std::string(problem.substr(0, std::min(problem.find("; last read"), kProblemMax)));
}

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

// nlohmann's SAX parser calls these functions.
class JsonReader::Events {
 public:
  Events(const JsonReader& reader, const JsonPlace& top) : reader_(reader), next_(&top) {}

  bool null() { return begin("null", nullptr), true; }
  bool boolean(bool /*value*/) { return begin("boolean", nullptr), true; }
  bool number_integer(std::int64_t value) { return other_number(std::to_string(value)); }
  bool number_unsigned(std::uint64_t value) {
    const JsonPlace* const place = begin("number", &JsonPlace::integer);
    if (place == nullptr) return true;
    if (value > INT64_MAX) reader_.fail(fmt::format("{} does not fit 63 bits", place->what));
    place->integer(static_cast<std::int64_t>(value));
    return true;
  }
  bool number_float(double /*value*/, const std::string& text) { return other_number(text); }
  bool string(std::string& text) {
    if (const JsonPlace* const place = begin("string", &JsonPlace::text)) place->text(text);
    return true;
  }
  bool binary(Json::binary_t& /*value*/) { return false; }  // JSON's text has none
  bool start_object(std::size_t /*members*/) {
    return push(begin("object", &JsonPlace::member), true);
  }
  bool key(std::string& key) {
    Frame& frame = frames_.back();
    if (frame.distinct && !frame.keys.insert(key).second) reader_.fail_twice(key);
    next_ = frame.place != nullptr ? &frame.place->member(key) : &kSkipped;
    return true;
  }
  bool end_object() { return pop(); }
  bool start_array(std::size_t /*elements*/) {
    return push(begin("array", &JsonPlace::element), false);
  }
  bool end_array() { return pop(); }
  bool parse_error(std::size_t /*read*/, const std::string& /*token*/,
                   const Json::exception& error) {
    reader_.fail(problem_in(error));
  }

 private:
  struct Frame {
    const JsonPlace* place;  // null: skipped
    bool object;
    bool distinct;
    int skipped;                      // containers about its values that are skipped
    std::set<std::string> keys = {};  // of distinct ones
  };

  const JsonPlace& place_of_value() {
    if (frames_.empty() || frames_.back().object) return *next_;
    return frames_.back().place != nullptr ? frames_.back().place->element() : kSkipped;
  }

  // A value begins: its place, if that has this function, or null for a value that is skipped.
  // `function`: a member of JsonPlace; null: no place has one.
  template <typename Function>
  const JsonPlace* begin(std::string_view kind, Function function) {
    const JsonPlace& place = place_of_value();
    if (!frames_.empty() && frames_.back().skipped > kNestingMax)
      reader_.fail(fmt::format("a value nests deeper than {}", kNestingMax));
    if constexpr (!std::is_null_pointer_v<Function>) {
      if (place.*function) return &place;
    }
    if (!place.other) fail_wanted(place, kind);
    place.other(kind);
    return nullptr;
  }

  bool push(const JsonPlace* place, bool object) {
    const int outer = frames_.empty() ? 0 : frames_.back().skipped;
    frames_.push_back(
        {place, object, place == nullptr || place->distinct, place == nullptr ? outer + 1 : 0});
    return true;
  }

  bool pop() {
    const JsonPlace* const place = frames_.back().place;
    frames_.pop_back();
    if (place != nullptr && place->end) place->end();
    return true;
  }

  // One that is negative, or has a fraction or an exponent.
  bool other_number(const std::string& text) {
    if (const JsonPlace* const place = begin("number", &JsonPlace::integer))
      fail_wanted(*place, in_quotes(text));
    return true;
  }

  [[noreturn]] void fail_wanted(const JsonPlace& place, std::string_view found) const {
    reader_.fail(fmt::format("wanted {}, found {}", place.what, found));
  }

  const JsonReader& reader_;
  const JsonPlace* next_;      // of the value that comes, but in arrays
  std::vector<Frame> frames_;  // objects and arrays about the next token
};

void JsonReader::read(const JsonPlace& top) {
  if (text_.starts_with('\xEF')) fail("it begins with a byte order mark");  // the parser skips it
  Events events(*this, top);
  Json::sax_parse(Byte{{}, text_.data(), &at_, 0}, Byte{{}, text_.data(), &at_, text_.size()},
                  &events, Json::input_format_t::json, /*strict=*/false);
  at_ = std::min(text_.find_first_not_of(" \n\t\r", at_ + 1), text_.size());
  if (at_ != text_.size()) fail(fmt::format("{} follows its end", in_quotes(text_.substr(at_, 1))));
}

}  // namespace strata::format
