// The one strict reader of JSON that others wrote: headers of safetensors files and the index of a
// checkpoint, and the members of a manifest. nlohmann::json's SAX parser reads the tokens, and no
// tree is built. The caller describes what may stand at each place of the text; a value of another
// kind is refused where it begins. Strict: strings are valid UTF-8 without lone surrogates, numbers
// are non-negative integers without leading zeros that fit 63 bits, skipped values nest to a bound,
// and skipped objects have no key twice. Threads: one thread. Ownership: borrows the text. Errors:
// FormatError with the path and the byte of the text; nothing of unbounded size is allocated before
// the text that asks for it was read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/error.h"
#include "strata/base/units.h"

namespace strata::format {

// The whole text of a file, called `what` in messages. FormatError where it is longer than `max`.
std::string read_text(const std::string& path, std::string_view what, Bytes max);

// For messages: "the header of a safetensors file", "is broken", "header".
struct JsonSubject {
  std::string_view name;
  std::string_view broken;
  std::string_view text;
};

// A place of the text: the values that may stand there, and the functions that take them.
struct JsonPlace {
  std::string_view what;  // for messages: "a shape in brackets"
  // An object: returns the place of the value behind a key.
  std::function<const JsonPlace&(std::string& key)> member = nullptr;
  // An array: returns the place of its next element.
  std::function<const JsonPlace&()> element = nullptr;
  std::function<void()> end = nullptr;  // of the object or the array
  std::function<void(std::string& text)> text = nullptr;
  std::function<void(std::int64_t number)> integer = nullptr;
  // A value of a kind ("object", "array", "string", "number", "boolean", "null") that has no
  // function above. Where it returns, the value is skipped. Null: the value is refused.
  std::function<void(std::string_view kind)> other = nullptr;
  bool distinct = false;  // the object has no key twice
};

class JsonReader {
 public:
  static constexpr int kNestingMax = 64;  // of a skipped value
  // Any value, skipped.
  static const JsonPlace kSkipped;

  JsonReader(std::string_view text, std::string_view path, const JsonSubject& subject)
      : text_(text), path_(path), subject_(subject) {}

  // Reads the whole text, which is one value.
  void read(const JsonPlace& top);
  // Throws FormatError for a problem of the token that is being read.
  [[noreturn]] void fail(std::string_view problem) const;
  // The same for a key that an object has twice: another reader may keep the other one's value.
  [[noreturn]] void fail_twice(std::string_view key) const;

 private:
  class Events;

  std::string_view text_;
  std::string_view path_;
  JsonSubject subject_;
  std::size_t at_ = 0;  // the last byte that the parser has read
};

// Members of one object of a tree, each asked for by its name and kind.
class JsonMembers {
 public:
  using Json = nlohmann::json;

  // `where` begins messages: "the manifest of a checkpoint is damaged: a tensor".
  JsonMembers(const Json& json, std::string where, std::string_view path)
      : json_(json), where_(std::move(where)), path_(path) {
    if (!json.is_object()) fail("is no object");
  }

  const Json& member(const char* name) const {
    const auto found = json_.find(name);
    if (found == json_.end()) fail(fmt::format("lacks '{}'", name));
    return *found;
  }
  const Json& array(const char* name) const { return of_kind(name, &Json::is_array, "list"); }
  std::string text(const char* name) const { return of_kind(name, &Json::is_string, "text"); }
  bool flag(const char* name) const { return of_kind(name, &Json::is_boolean, "true or false as"); }
  std::int64_t number(const char* name) const { return as_number(member(name), name); }
  std::vector<std::string> texts(const char* name) const {
    std::vector<std::string> result;
    for (const Json& entry : array(name)) {
      if (!entry.is_string()) fail(fmt::format("has something else than text in '{}'", name));
      result.push_back(entry.get<std::string>());
    }
    return result;
  }
  // The value of a member, or of an element of the member `name`.
  std::int64_t as_number(const Json& json, const char* name) const {
    const bool fits = json.is_number_integer() &&
                      !(json.is_number_unsigned() && json.get<std::uint64_t>() > INT64_MAX);
    if (!fits) fail(fmt::format("has no whole number as '{}'", name));
    return json;
  }
  DType dtype(const Json& json) const {
    const auto found =
        json.is_string() ? dtype_from_safetensors(json.get<std::string>()) : std::nullopt;
    if (!found) fail("has an unknown dtype");
    return *found;
  }
  [[noreturn]] void fail(std::string_view what) const {
    throw FormatError("{} {}: path={}", where_, what, path_);
  }

 private:
  const Json& of_kind(const char* name, bool (Json::*is)() const noexcept,
                      std::string_view kind) const {
    const Json& found = member(name);
    if (!(found.*is)()) fail(fmt::format("has no {} '{}'", kind, name));
    return found;
  }

  const Json& json_;
  std::string where_;
  std::string_view path_;
};

}  // namespace strata::format
