#include "strata/base/error.h"

#include <array>
#include <cstring>
#include <system_error>

#include "strata/base/units.h"

namespace strata {

void throw_assert_failed(const char* expression, const char* file, int line) {
  const char* slash = std::strrchr(file, '/');
  throw InternalError(
      "internal error: {} does not hold at {}:{}; please report it with the configuration that led "
      "here",
      expression, slash != nullptr ? slash + 1 : file, line);
}

std::string errno_text(int code) {
  return fmt::format("errno={} ({})", code, std::generic_category().message(code));
}

std::string to_string(Bytes bytes) {
  constexpr std::array<const char*, 5> kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  double amount = static_cast<double>(bytes.value);
  std::size_t unit = 0;
  while (amount >= 1024.0 && unit + 1 < kUnits.size()) {
    amount /= 1024.0;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} B", bytes.value);
  const int decimals = amount < 10.0 ? 2 : (amount < 100.0 ? 1 : 0);
  return fmt::format("{:.{}f} {}", amount, decimals, kUnits[unit]);
}

}  // namespace strata
