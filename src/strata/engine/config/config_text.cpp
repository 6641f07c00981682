#include "strata/engine/config/config_text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>
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
  std::string_view sentinel;
  double value;
};
constexpr std::array<Token, 3> kTokens{{
    {"-Infinity", "\x7f-Infinity", -std::numeric_limits<double>::infinity()},
    {"Infinity", "\x7fInfinity", std::numeric_limits<double>::infinity()},
    {"NaN", "\x7fNaN", std::numeric_limits<double>::quiet_NaN()},
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
        if (text_[at_] == '}' || text_[at_] == ']') {  // drops a trailing comma
          const auto last = out_.find_last_not_of(" \t\r\n");
          if (last != std::string::npos && out_[last] == ',') out_[last] = ' ';
        }
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
      out_ += fmt::format("\"{}\"", token.sentinel);
      at_ += token.text.size();
      return true;
    }
    return false;
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::string out_;
};

// A config is a page of text; a larger file was named by mistake.
constexpr Bytes kMaxSize = 16_MiB;

int digit_of(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  if (c == '-' || c == '+') return 62;
  if (c == '_' || c == '/') return 63;
  return -1;
}

std::optional<std::string> decode_base64(std::string_view text) {
  while (!text.empty() && (text.back() == '=' || text.back() == '\n')) text.remove_suffix(1);
  if (text.empty() || text.size() % 4 == 1) return std::nullopt;
  std::string out;
  std::uint32_t bits = 0;
  int held = 0;
  for (const char c : text) {
    const int digit = digit_of(c);
    if (digit < 0) return std::nullopt;
    bits = (bits << 6) | static_cast<std::uint32_t>(digit);
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
  if (!error && size > kMaxSize.size())
    throw ConfigError("{} is not a configuration: it has {} bytes, at most {} are read",
                      path.string(), size, kMaxSize.value);
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  if (!file || error)
    throw ConfigError("cannot read the configuration {}; check that it may be read", path.string());
  return content.str();
}

std::string shortened(std::string_view text) {
  constexpr std::size_t kShown = 80;
  return text.size() <= kShown ? std::string(text) : std::string(text.substr(0, kShown)) + "...";
}

struct ConfigSource {
  std::string text;    // JSON
  std::string origin;  // "/data/ds.json", "the configuration": for messages
};

ConfigSource open_config_source(std::string_view text_or_path) {
  const auto first = text_or_path.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos)
    throw ConfigError("the configuration is empty; write at least {\"train_batch_size\": 1}");
  if (text_or_path[first] == '[' || text_or_path.find('{') != std::string_view::npos)
    return {std::string(text_or_path), "the configuration"};
  const std::filesystem::path path(text_or_path);
  std::error_code error;
  if (std::filesystem::is_regular_file(path, error)) return {read_file(path), path.string()};
  auto decoded = decode_base64(text_or_path.substr(first));
  if (decoded && decoded->find('{') != std::string::npos)
    return {std::move(*decoded), "the base64 configuration"};
  throw ConfigError(
      "the configuration is neither JSON text, nor the path of a file that exists, nor JSON in "
      "base64; found \"{}\"",
      shortened(text_or_path));
}

}  // namespace

ordered_json parse_json_text(std::string_view text, std::string_view origin) {
  const std::string strict = StrictCopy(text).run();
  // The keys so far of each open object; an open list has none.
  std::vector<std::vector<std::string>> open;
  using Event = ordered_json::parse_event_t;
  const auto look = [&](int /*depth*/, Event event, ordered_json& parsed) {
    if (event == Event::object_start || event == Event::array_start) {
      if (open.size() >= kMaxDepth)
        throw ConfigError("{} nests objects and lists deeper than {} levels", origin, kMaxDepth);
      open.emplace_back();
    } else if (event == Event::object_end || event == Event::array_end) {
      open.pop_back();
    } else if (event == Event::key) {
      const auto name = parsed.get<std::string>();
      std::vector<std::string>& names = open.back();
      if (std::ranges::find(names, name) != names.end()) {
        std::string path;
        for (std::size_t i = 0; i + 1 < open.size(); ++i)
          path += (open[i].empty() ? "[]" : open[i].back()) + ".";
        throw ConfigError("{}{}: the key is given twice in {}; keep one of the two", path, name,
                          origin);
      }
      names.push_back(name);
    } else if (parsed.is_string()) {
      for (const Token& token : kTokens) {
        if (parsed == token.sentinel) parsed = token.value;
      }
    }
    return true;
  };
  try {
    return ordered_json::parse(strict, look);
  } catch (const ordered_json::parse_error& error) {
    const auto end =
        strict.begin() + static_cast<std::ptrdiff_t>(std::min(error.byte, strict.size()));
    throw JsonSyntaxError("{} is not JSON; correct line {}: {}", origin,
                          1 + std::count(strict.begin(), end, '\n'), error.what());
  } catch (const ordered_json::exception& error) {
    throw JsonSyntaxError("{} is not JSON: {}", origin, error.what());
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

ordered_json open_document(std::string_view text_or_path) {
  const ConfigSource source = open_config_source(text_or_path);
  ordered_json document = parse_json_text(source.text, source.origin);
  if (document.is_object()) return document;
  throw ConfigError("{}: wanted an object {{ ... }} of settings; found {}", source.origin,
                    shown(document));
}

}  // namespace strata::engine
