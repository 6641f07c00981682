#include "strata/engine/unit/unit_numbers.h"

#include <fmt/ranges.h>

#include <iterator>
#include <sstream>

namespace strata::engine {

std::string text_of_numbers(std::span<const int> numbers) {
  return fmt::format("{}", fmt::join(numbers, " "));
}

std::vector<int> numbers_of_text(const std::string& text) {
  std::istringstream words(text);
  return {std::istream_iterator<int>(words), std::istream_iterator<int>()};
}

}  // namespace strata::engine
