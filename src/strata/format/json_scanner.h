// Reads JSON of others' files token by token: headers of safetensors files, and the index of a
// checkpoint. The caller asks for the kind of value that the format allows at each place; there is
// no tree. A value of another kind is refused where it begins. A value that is skipped may nest to
// a bound. Strict: strings are valid UTF-8 with every escape of JSON and no lone surrogate, numbers
// are non-negative integers without leading zeros that fit 63 bits, and objects that are skipped
// have no key twice. Threads: one thread. Ownership: borrows the text. Errors: FormatError with the
// path and the byte of the text; nothing of unbounded size is allocated before the text that asks
// for it was read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>

namespace strata::format {

// For messages: "the header of a safetensors file", "is broken", "header".
struct JsonSubject {
  std::string_view name;
  std::string_view broken;
  std::string_view text;
};

class JsonScanner {
 public:
  JsonScanner(std::string_view text, std::string_view path, const JsonSubject& subject)
      : text_(text), path_(path), subject_(subject) {}

  // The kind of the value that begins here: "object", "array", "string", "number", "boolean",
  // "null".
  std::string_view kind();

  // Calls member(key) for each member of the object that begins here; it reads the value.
  template <typename Member>
  void object(std::string_view what, Member&& member) {
    expect('{', what);
    if (consume('}')) return;
    do {
      std::string key = string("a key");
      expect(':', "':' after a key");
      member(std::move(key));
    } while (consume(','));
    expect('}', "',' or '}' after a member");
  }
  // The same, of an object in which no key may be twice.
  template <typename Member>
  void distinct_object(std::string_view what, Member&& member) {
    std::set<std::string> keys;
    object(what, [&](std::string key) {
      if (!keys.insert(key).second) fail_twice(key);
      member(std::move(key));
    });
  }
  // Calls element() for each element of the array that begins here; it reads the element.
  template <typename Element>
  void array(std::string_view what, Element&& element) {
    expect('[', what);
    if (consume(']')) return;
    do {
      element();
    } while (consume(','));
    expect(']', "',' or ']' after an element");
  }
  std::string string(std::string_view what);
  std::int64_t integer(std::string_view what);
  // Reads past a value of any kind, which must be JSON. May nest kNestingMax deep.
  void skip_value() { skip_value(0); }
  static constexpr int kNestingMax = 64;
  // Only whitespace may follow.
  void end();

  // Throws FormatError for a problem at the place reached.
  [[noreturn]] void fail(std::string_view problem) const;
  // The same for a key that an object has twice: another reader may keep the other one's value.
  [[noreturn]] void fail_twice(std::string_view key) const;

 private:
  void skip_value(int nesting);
  void skip_whitespace();
  bool consume(char c);
  void expect(char c, std::string_view what);
  [[noreturn]] void fail_wanted(std::string_view what) const;
  void escape(std::string& out);
  std::uint32_t hex4();
  void utf8_sequence(std::string& out);

  std::string_view text_;
  std::string_view path_;
  JsonSubject subject_;
  std::size_t at_ = 0;
};

}  // namespace strata::format
