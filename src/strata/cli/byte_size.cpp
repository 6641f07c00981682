#include "strata/cli/byte_size.h"

#include <array>
#include <charconv>
#include <cmath>
#include <string>
#include <utility>

#include "strata/base/error.h"
#include "strata/format/safetensors.h"

namespace strata::cli {
namespace {

constexpr std::array<std::pair<std::string_view, double>, 10> kUnits{{
    {"", 1.0},
    {"B", 1.0},
    {"KB", 1e3},
    {"MB", 1e6},
    {"GB", 1e9},
    {"TB", 1e12},
    {"KIB", 1024.0},
    {"MIB", 1048576.0},
    {"GIB", 1073741824.0},
    {"TIB", 1099511627776.0},
}};
constexpr double kMost = 9e18;  // of 63 bits

std::string upper(std::string_view text) {
  std::string result;
  for (const char c : text) result += c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  return result;
}

}  // namespace

Bytes parse_byte_size(std::string_view text, std::string_view option) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  std::string_view rest(stop, static_cast<std::size_t>(end - stop));
  while (!rest.empty() && rest.front() == ' ') rest.remove_prefix(1);
  if (error == std::errc()) {
    for (const auto& [unit, factor] : kUnits) {
      const double bytes = std::floor(number * factor);
      if (upper(rest) == unit && bytes >= 1 && bytes < kMost)
        return Bytes(static_cast<std::int64_t>(bytes));
    }
  }
  throw UsageError(fmt::format(
      "{}: wanted a size above 0 with a unit, as 5GB (10^9 bytes) or 80GiB (2^30); found {}",
      option, format::in_quotes(text)));
}

}  // namespace strata::cli
