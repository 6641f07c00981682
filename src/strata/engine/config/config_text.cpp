#include "strata/engine/config/config_text.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <system_error>
#include <vector>

#include "strata/base/units.h"
#include "strata/engine/config/value_check.h"

namespace strata::engine {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::size_t kMaxDepth = 64;

// JSON has no token for these, so they travel through the parser as improbable texts.
struct Token {
  std::string_view text;
  std::string_view sentinel;  // with its quotes
  double value;
};
constexpr std::array<Token, 3> kTokens{{
    {"-Infinity", "\"\x7f-Infinity\"", -std::numeric_limits<double>::infinity()},
    {"Infinity", "\"\x7fInfinity\"", std::numeric_limits<double>::infinity()},
    {"NaN", "\"\x7fNaN\"", std::numeric_limits<double>::quiet_NaN()},
}};

// Copies JSON without comments and trailing commas; lines stay where they are.
class StrictCopy {
 public:
  explicit StrictCopy(std::string_view text) : text_(text) {}

  std::string run() {
    while (at_ < text_.size()) {
      if (text_[at_] == '"') {
        copy_string();
      } else if (text_[at_] == '#' || starts("//")) {
        while (at_ < text_.size() && text_[at_] != '\n') ++at_;
      } else if (starts("/*")) {
        skip_block();
      } else if (!copy_token()) {
        if (text_[at_] == '}' || text_[at_] == ']') drop_trailing_comma();
        out_ += text_[at_++];
      }
    }
    return std::move(out_);
  }

 private:
  bool starts(std::string_view what) const { return text_.substr(at_, what.size()) == what; }

  void copy_string() {
    do {
      if (text_[at_] == '\\' && at_ + 1 < text_.size()) out_ += text_[at_++];
      out_ += text_[at_++];
    } while (at_ < text_.size() && text_[at_] != '"');
    if (at_ < text_.size()) out_ += text_[at_++];
  }

  void skip_block() {
    const auto end = text_.find("*/", at_ + 2);
    const auto stop = end == std::string_view::npos ? text_.size() : end + 2;
    for (; at_ < stop; ++at_) {
      if (text_[at_] == '\n') out_ += '\n';
    }
  }

  bool copy_token() {
    for (const Token& token : kTokens) {
      if (!starts(token.text)) continue;
      out_ += token.sentinel;
      at_ += token.text.size();
      return true;
    }
    return false;
  }

  void drop_trailing_comma() {
    const auto last = out_.find_last_not_of(" \t\r\n");
    if (last != std::string::npos && out_[last] == ',') out_[last] = ' ';
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::string out_;
};

// The byte of `text` where the parser gave up.
std::size_t place_of(const json::exception& error, std::string_view text) {
  if (const auto* syntax = dynamic_cast<const json::parse_error*>(&error)) return syntax->byte;
  std::string_view number = error.what();  // "... number overflow parsing '1e999'"
  number.remove_prefix(std::min(number.find('\'') + 1, number.size()));
  return text.find(number.substr(0, number.find('\'')));
}

// A config is a page of text; a larger file was named by mistake.
constexpr Bytes kMaxSize = 16_MiB;

std::optional<std::string> decode_base64(std::string_view text) {
  while (!text.empty() && (text.back() == '=' || text.back() == '\n')) text.remove_suffix(1);
  if (text.empty() || text.size() % 4 == 1) return std::nullopt;
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  std::string out;
  std::size_t bits = 0;
  int held = 0;
  for (const char c : text) {
    const std::size_t digit = kDigits.find(c == '+' ? '-' : c == '/' ? '_' : c);
    if (digit == std::string_view::npos) return std::nullopt;
    bits = (bits << 6) | digit;
    held += 6;
    if (held < 8) continue;
    held -= 8;
    out += static_cast<char>((bits >> held) & 0xFFU);
  }
  return out;
}

std::string read_file(const std::filesystem::path& path) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (!error && size > kMaxSize.size()) {
    throw ConfigError(fmt::format("{} is not a configuration: it has {} bytes, at most {} are read",
                                  path.string(), size, kMaxSize.value));
  }
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  if (!file || error) {
    throw ConfigError(
        fmt::format("cannot read the configuration {}; check that it may be read", path.string()));
  }
  return content.str();
}

}  // namespace

ordered_json parse_json_text(std::string_view text, std::string_view origin) {
  struct Part {
    std::string at;  // the last key; "[]" in a list
    std::set<std::string> keys{};
  };
  std::vector<Part> open;  // objects and lists, from the root
  const auto see = [&](int, json::parse_event_t event, ordered_json& part) {
    using Event = json::parse_event_t;
    if (event == Event::object_start || event == Event::array_start) {
      if (open.size() >= kMaxDepth) {
        throw ConfigError(
            fmt::format("{} nests objects and lists deeper than {} levels", origin, kMaxDepth));
      }
      open.push_back({event == Event::array_start ? "[]" : ""});
    } else if (event == Event::object_end || event == Event::array_end) {
      open.pop_back();
    } else if (event == Event::key) {
      open.back().at = part.get<std::string>();
      if (!open.back().keys.insert(open.back().at).second) {
        std::vector<std::string> path;
        for (const Part& each : open) path.push_back(each.at);
        throw ConfigError(fmt::format("{}: the key is given twice in {}; keep one of the two",
                                      fmt::join(path, "."), origin));
      }
    } else if (part.is_string()) {
      const std::string quoted = '"' + part.get_ref<const std::string&>() + '"';
      const auto* token = std::ranges::find(kTokens, quoted, &Token::sentinel);
      if (token != kTokens.end()) part = token->value;
    }
    return true;
  };
  const std::string strict = StrictCopy(text).run();
  try {
    return ordered_json::parse(strict, see);
  } catch (const json::exception& e) {
    const std::string before = strict.substr(0, place_of(e, strict));
    throw JsonSyntaxError(fmt::format("{} is not JSON; correct line {}: {}", origin,
                                      1 + std::ranges::count(before, '\n'), e.what()));
  }
}

std::string canonical_text(const json& value) {
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    const double v = value.get<double>();
    return std::isnan(v) ? "NaN" : (v > 0 ? "Infinity" : "-Infinity");
  }
  if (value.is_array() || value.is_object()) {
    std::string text;
    for (const auto& [name, item] : value.items()) {
      if (!text.empty()) text += ",";
      if (value.is_object()) text += json(name).dump() + ":";
      text += canonical_text(item);
    }
    return value.is_array() ? "[" + text + "]" : "{" + text + "}";
  }
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

ConfigSource open_config_source(std::string_view text_or_path) {
  const auto first = text_or_path.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) {
    throw ConfigError("the configuration is empty; write at least {\"train_batch_size\": 1}");
  }
  if (text_or_path[first] == '[' || text_or_path.find('{') != std::string_view::npos) {
    return {std::string(text_or_path), "the configuration"};
  }
  const std::filesystem::path path(text_or_path);
  std::error_code error;
  if (std::filesystem::is_regular_file(path, error)) return {read_file(path), path.string()};
  auto decoded = decode_base64(text_or_path.substr(first));
  if (decoded && decoded->find('{') != std::string::npos) {
    return {std::move(*decoded), "the base64 configuration"};
  }
  constexpr std::size_t kShown = 80;
  throw ConfigError(
      fmt::format("the configuration is neither JSON text, nor the path of a file that exists, nor "
                  "JSON in base64; found \"{}{}\"",
                  text_or_path.substr(0, kShown), text_or_path.size() > kShown ? "..." : ""));
}

ordered_json open_document(std::string_view text_or_path) {
  const ConfigSource source = open_config_source(text_or_path);
  ordered_json document = parse_json_text(source.text, source.origin);
  if (document.is_object()) return document;
  throw ConfigError(fmt::format("{}: wanted an object {{ ... }} of settings; found {}",
                                source.origin, shown(document)));
}

}  // namespace strata::engine
