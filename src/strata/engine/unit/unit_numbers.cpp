#include "strata/engine/unit/unit_numbers.h"

#include <fmt/ranges.h>

#include <iterator>
#include <sstream>

namespace strata::engine {

std::string text_of_units(std::span<const int> units) {
  return fmt::format("{}", fmt::join(units, " "));
}

std::vector<int> units_of_text(const std::string& text) {
  std::istringstream words(text);
  return {std::istream_iterator<int>(words), std::istream_iterator<int>()};
}

}  // namespace strata::engine
