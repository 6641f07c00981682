// Reads the JSON of a safetensors header token by token, driven by what the format allows at each
// place: there is no tree, since a value of another kind than the one asked for is refused where it
// begins. Only a value that nobody asked for may nest, to a bound. Strict: strings are valid UTF-8
// with every escape of JSON and no lone surrogate, numbers are non-negative integers without
// leading zeros that fit 63 bits. Threads: one thread. Ownership: borrows the text. Errors:
// FormatError with the path and the byte of the header; nothing of unbounded size is allocated
// before the text that asks for it was read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace strata::format {

class HeaderScanner {
 public:
  HeaderScanner(std::string_view text, std::string_view path) : text_(text), path_(path) {}

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
  std::size_t at_ = 0;
};

}  // namespace strata::format
