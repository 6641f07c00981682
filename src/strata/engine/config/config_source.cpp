#include "strata/engine/config/config_source.h"

#include <fmt/core.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <system_error>

#include "strata/base/error.h"
#include "strata/base/units.h"

namespace strata::engine {
namespace {

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

std::string shortened(std::string_view text) {
  constexpr std::size_t kShown = 80;
  return text.size() <= kShown ? std::string(text) : std::string(text.substr(0, kShown)) + "...";
}

}  // namespace

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
  throw ConfigError(
      fmt::format("the configuration is neither JSON text, nor the path of a file that exists, nor "
                  "JSON in base64; found \"{}\"",
                  shortened(text_or_path)));
}

}  // namespace strata::engine
